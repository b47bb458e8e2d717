// One side: its settings, its conversation, and the request that it has under way.

import { APIError, complete, render } from "./api.js";
import { Answer } from "./answer.js";

const NEAR_END_PX = 48;
const FINISHES = {
  length: "Stopped at max tokens.",
  abort: "The server ended it.",
};

export class Arm {
  isOn = true;
  /** The last answer that came to its end. */
  last = null;
  #messages = [];
  #abort = null;
  #isAtEnd = true;
  #form;
  #log;

  constructor(name, template) {
    this.name = name;
    this.element = template.content.firstElementChild.cloneNode(true);
    this.element.dataset.arm = name;
    this.element.setAttribute("aria-label", `Arm ${name}`);
    this.element.querySelector(".badge").textContent = name;
    this.#form = this.element.querySelector("form");
    this.#log = this.element.querySelector(".log");
    this.#log.setAttribute("aria-label", `Conversation of arm ${name}`);
    this.#log.addEventListener("scroll", () => {
      this.#isAtEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR_END_PX;
    });
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    for (const field of this.#form.elements) {
      if (field.id) this.#renameField(field);
    }
    this.#form.addEventListener("input", () => this.#summarize());
  }

  get isBusy() {
    return this.#abort !== null;
  }

  /** What can be chosen. facts: of the server; drafter: what this arm starts with. */
  offer(facts, drafter) {
    const { model, speculation, max_tokens: maxTokens } = this.#form.elements;
    fill(model, facts.models.map((name) => [name, name]));
    const own = facts.default_drafter ?? "off";
    const drafters = facts.drafters.map((name) => [name, name]);
    fill(speculation, [["", `default (${own})`], ["off", "off"], ...drafters]);
    speculation.value = drafter;
    speculation.disabled = !facts.drafters.length;
    maxTokens.max = String(facts.max_model_len);
    this.#summarize();
  }

  /** Asks the model. Resolves when the answer has come to its end, however it ended. */
  async send(prompt, isChat) {
    this.#abort = new AbortController();
    this.last = null;
    const question = document.createElement("div");
    question.className = isChat ? "question" : "question raw";
    question.textContent = prompt;
    const answer = new Answer(() => this.#follow());
    this.element.querySelector(".empty").hidden = true;
    this.#log.setAttribute("aria-busy", "true");
    this.#log.append(question, answer.element);
    this.#isAtEnd = true;
    this.#follow();
    try {
      await this.#stream(answer, prompt, isChat);
      this.last = answer;
    } catch (error) {
      if (error.name === "AbortError") answer.end("Stopped.");
      else answer.end(words(error), true);
    } finally {
      this.#abort = null;
      this.#log.setAttribute("aria-busy", "false");
    }
    if (isChat && answer.text) {
      this.#messages.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
    }
    return answer;
  }

  /** Aborts the request, in the engine too. */
  stop() {
    this.#abort?.abort();
  }

  /** Forgets the conversation. */
  clear() {
    this.stop();
    this.#messages = [];
    this.last = null;
    this.#log.replaceChildren();
    this.element.querySelector(".empty").hidden = false;
  }

  async #stream(answer, prompt, isChat) {
    const { signal } = this.#abort;
    const messages = [...this.#messages, { role: "user", content: prompt }];
    const rendered = isChat ? await render(messages, signal) : prompt;
    answer.begin();
    let finish = null;
    for await (const choice of complete({ ...this.#settings(), prompt: rendered }, signal)) {
      answer.add(choice);
      finish = choice.finish_reason ?? finish;
    }
    answer.end(FINISHES[finish] ?? "");
  }

  /** Fields that are empty are left out. Each arm has prefixes of its own in the cache, so that none profits from
   *  what the other has computed. */
  #settings() {
    const settings = { cache_salt: `playground-${this.name}` };
    for (const { name, value, type } of this.#form.elements) {
      if (name && value !== "") settings[name] = type === "number" ? Number(value) : value;
    }
    return settings;
  }

  #summarize() {
    const { speculation, temperature } = this.#form.elements;
    const drafter = speculation.selectedOptions[0]?.textContent ?? "";
    this.element.querySelector(".choice").textContent = `drafter ${drafter}, temperature ${temperature.value || "default"}`;
  }

  #renameField(field) {
    const label = this.#form.querySelector(`label[for="${field.id}"]`);
    field.id = `${field.id}-${this.name}`;
    label.htmlFor = field.id;
  }

  /** Stays at the end of the log, unless the user has scrolled away from it. */
  #follow() {
    if (this.#isAtEnd) this.#log.scrollTop = this.#log.scrollHeight;
  }
}

function fill(select, options) {
  select.replaceChildren(
    ...options.map(([value, text]) => {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = text;
      return option;
    }),
  );
}

function words(error) {
  const names = error instanceof APIError && error.param && !error.message.startsWith(error.param);
  return names ? `${error.param}: ${error.message}` : error.message;
}
