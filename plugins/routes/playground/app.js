// The page: which arms there are, what is sent to them, and how they compare.

import { APIError, apiKey, facts } from "./api.js";
import { Arm } from "./arm.js";
import { LiveMetrics } from "./metrics.js";

const find = (selector) => document.querySelector(selector);
const page = {
  arms: find("#arms"),
  status: find("#status"),
  problem: find("#problem"),
  prompt: find("#prompt"),
  composer: find("#composer"),
  send: find("#send"),
  stop: find("#stop"),
  clear: find("#clear"),
  inTurn: find("#in-turn"),
  access: find("#access"),
  key: find("#key"),
};
/** Of shorter answers the speeds are not compared. */
const LEAST_TOKENS = 32;
const isSmall = matchMedia("(max-width: 760px)");
const template = find("#arm");
const arms = [new Arm("A", template), new Arm("B", template)];
const live = new LiveMetrics(find("#metrics"));
page.arms.append(...arms.map((arm) => arm.element));

const chosen = (name) => find(`input[name="${name}"]:checked`).value;
const active = () => arms.slice(0, Number(chosen("sides")));
let isStopped = false;
const isBusy = () => arms.some((arm) => arm.isBusy);

async function connect() {
  try {
    show(await facts());
    page.problem.textContent = "";
    live.start();
  } catch (error) {
    page.problem.textContent = error.message;
    if (error instanceof APIError && error.status === 401) {
      page.access.open = true;
      page.key.focus();
    }
  }
}

function show(known) {
  find("#model").textContent = known.models[0];
  find("#rule").textContent = known.drafters.length ? `acceptance: ${known.acceptance}` : "no drafters configured";
  arms[0].offer(known, known.default_drafter ?? known.drafters[0] ?? "");
  arms[1].offer(known, known.drafters.length ? "off" : "");
  const chat = find('input[name="mode"][value="chat"]');
  chat.disabled = known.no_chat !== null;
  chat.parentElement.title = known.no_chat ?? "";
  find(`input[name="mode"][value="${known.no_chat === null ? "chat" : "raw"}"]`).checked = true;
  if (!known.drafters.length || isSmall.matches) find('input[name="sides"][value="1"]').checked = true;
  arrange();
  page.prompt.focus();
}

/** As many arms as were chosen, and the words that fit the mode. */
function arrange() {
  const shown = active();
  for (const arm of arms) arm.element.hidden = !shown.includes(arm);
  page.arms.dataset.sides = String(shown.length);
  page.inTurn.parentElement.hidden = shown.length < 2;
  const isChat = chosen("mode") === "chat";
  page.prompt.placeholder = isChat ? "Ask something" : "Text to go on from";
  update();
}

function update() {
  page.send.disabled = isBusy() || !page.prompt.value.trim();
  page.stop.disabled = !isBusy();
}

async function send() {
  const prompt = page.prompt.value;
  if (isBusy() || !prompt.trim()) return;
  page.prompt.value = "";
  resize();
  page.status.textContent = "";
  const shown = active();
  const isChat = chosen("mode") === "chat";
  const inTurn = page.inTurn.checked && shown.length > 1;
  isStopped = false;
  const answers = [];
  if (inTurn) {
    for (const arm of shown) {
      if (!isStopped) answers.push(await run(arm, prompt, isChat));
    }
  } else {
    answers.push(...(await Promise.all(shown.map((arm) => run(arm, prompt, isChat)))));
  }
  page.status.textContent = compared(shown, inTurn) || answers.map((each, i) => `${shown[i].name}: ${each.summary}`).join(" ");
  update();
}

function run(arm, prompt, isChat) {
  const running = arm.send(prompt, isChat);
  update();
  return running.finally(update);
}

/** How two whole answers differ in speed and in their tokens; empty where there are not two. */
function compared(shown, inTurn) {
  const [a, b] = shown.map((arm) => arm.last);
  if (!a || !b) return "";
  const at = a.tokens.findIndex((token, index) => token.text !== b.tokens[index]?.text);
  const isSame = at < 0 && a.tokens.length === b.tokens.length;
  const tokens = isSame ? "Same tokens." : `Tokens differ from number ${(at < 0 ? a.tokens.length : at) + 1} on.`;
  if (Math.min(a.tokens.length, b.tokens.length) < LEAST_TOKENS) return tokens;
  const [fast, slow] = a.speed >= b.speed ? ["A", "B"] : ["B", "A"];
  const ratio = Math.max(a.speed, b.speed) / Math.min(a.speed, b.speed);
  const caveat = inTurn ? "" : " (both ran at once and shared the machine)";
  return `${fast} wrote ${ratio.toFixed(2)}\u00d7 the tokens/s of ${slow}${caveat}. ${tokens}`;
}

function stop() {
  isStopped = true;
  for (const arm of arms) arm.stop();
}

function resize() {
  page.prompt.style.height = "auto";
  page.prompt.style.height = `${page.prompt.scrollHeight + 2}px`;
}

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
page.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
page.prompt.addEventListener("input", () => {
  resize();
  update();
});
page.stop.addEventListener("click", stop);
page.clear.addEventListener("click", () => {
  for (const arm of arms) arm.clear();
  page.status.textContent = "";
  page.prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isBusy()) {
    stop();
    page.prompt.focus();
  }
});
for (const choice of document.querySelectorAll(".switch input")) choice.addEventListener("change", arrange);
page.key.value = apiKey.get();
page.key.form.addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(page.key.value.trim());
  page.access.open = false;
  connect();
});

/** What a wide screen shows at once is folded on a small one. */
function fold() {
  for (const each of document.querySelectorAll("details.folds")) each.open = !isSmall.matches;
}
isSmall.addEventListener("change", fold);
fold();
arrange();
connect();
