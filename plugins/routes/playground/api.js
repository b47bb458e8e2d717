// The server's API: JSON, a stream of events, the metrics. Addresses are relative, so that a prefix of a proxy stays.

const KEY = "dovetail-api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** What the server refused, in its words. */
export class APIError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?", { cause: error });
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return new APIError(response.status, JSON.parse(text).error);
  } catch {
    return new APIError(response.status, { message: `${response.status} ${response.statusText}`, param: null });
  }
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

export const facts = async () => (await request("playground/facts")).json();

export const metrics = async () => (await request("metrics")).text();

/** The token ids of a conversation. */
export async function render(messages, signal) {
  return (await (await post("tokenize", { messages }, signal)).json()).tokens;
}

/** The choices of a completion as they come. Aborting the signal aborts the request in the engine. */
export async function* complete(body, signal) {
  const response = await post("v1/completions", { ...body, stream: true, return_accepted_spans: true }, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new APIError(response.status, event.error);
    yield* event.choices;
  }
  throw new Error("The stream broke off before its end.");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
