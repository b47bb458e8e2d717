// One answer: its text with accepted drafts marked, and its numbers. Text of the model is only ever set as text.

import { Aligner } from "./align.js";
import { Sparkline } from "./sparkline.js";

const STATS = [
  ["rate", "Acceptance", "accepted draft tokens / verified draft tokens"],
  ["length", "Mean length", "tokens per round, the bonus token included: 1 + accepted / rounds"],
  ["speed", "Tokens/s", "output tokens per second, from the first token on"],
  ["tokens", "Tokens", "output tokens; in brackets: accepted drafts"],
  ["ttft", "TTFT", "time to first token, as this page sees it"],
  ["itl", "ITL", "inter-token latency: median; the line shows the last 48 steps"],
];
/** Tokens that come closer together came at once: those of one step, or of steps that the network joined. */
const BURST_MS = 1;
const NONE = "\u2013";

export class Answer {
  text = "";
  tokens = [];
  speed = null;
  #aligner = new Aligner();
  #pending = [];
  #frame = 0;
  #started = 0;
  #bursts = []; // tokens that came at once: {time, numTokens}
  #numAccepted = 0;
  #gaps = []; // milliseconds for each token, of all bursts but the first and the last
  #cells = {};
  #sparkline = new Sparkline();
  #scrolls;
  #remark;

  /** scrolls: called when text was added. */
  constructor(scrolls) {
    this.#scrolls = scrolls;
    this.element = document.createElement("div");
    this.element.className = "answer";
    this.output = document.createElement("div");
    this.output.className = "output";
    this.#remark = document.createElement("p");
    this.#remark.className = "note";
    this.element.append(this.output, this.#stats(), this.#remark);
  }

  /** The request is on its way. */
  begin() {
    this.#started = performance.now();
  }

  /** A choice of an event: {text, tokens, finish_reason, speculation}. */
  add(choice) {
    this.#time(choice.tokens.length);
    this.text += choice.text;
    this.tokens.push(...choice.tokens);
    this.#numAccepted += choice.tokens.filter((token) => token.accepted).length;
    this.#pending.push(...this.#aligner.add(choice.text, choice.tokens));
    if (choice.speculation) this.#showSpeculation(choice.speculation);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** No more will come. note: why, where there is something to say. */
  end(note = "", isError = false) {
    this.#pending.push(...this.#aligner.finish());
    cancelAnimationFrame(this.#frame);
    this.#draw();
    this.element.classList.add("done");
    if (note) this.#note(note, isError);
  }

  /** For a screen reader. */
  get summary() {
    const rate = this.#cells.rate.textContent;
    return `${this.tokens.length} tokens${rate === NONE ? "" : `, acceptance ${rate}`}.`;
  }

  #note(text, isError) {
    this.#remark.classList.toggle("error", isError);
    this.#remark.role = isError ? "alert" : null;
    this.#remark.textContent = text;
    this.#scrolls();
  }

  #time(numTokens) {
    if (!numTokens) return;
    const time = performance.now();
    const last = this.#bursts.at(-1);
    if (last && time - last.time < BURST_MS) {
      last.numTokens += numTokens;
      return;
    }
    if (this.#bursts.length > 1) {
      this.#gaps.push((last.time - this.#bursts.at(-2).time) / last.numTokens);
      this.#sparkline.push(this.#gaps.at(-1));
    }
    this.#bursts.push({ time, numTokens });
  }

  #draw() {
    this.#frame = 0;
    for (const part of this.#pending.splice(0)) this.#append(part);
    this.#showTimes(this.#bursts[0], this.#bursts.at(-1));
    const accepted = this.#numAccepted ? ` (${this.#numAccepted})` : "";
    this.#show("tokens", `${this.tokens.length}${accepted}`);
    this.#scrolls();
  }

  #showTimes(first, last) {
    if (!first) return;
    this.#show("ttft", milliseconds(first.time - this.#started));
    if (first === last) return;
    this.speed = (1000 * (this.tokens.length - first.numTokens)) / (last.time - first.time);
    this.#show("speed", this.speed.toFixed(1));
    if (this.#gaps.length) this.#show("itl", milliseconds(median(this.#gaps)));
  }

  #append({ text, accepted }) {
    const last = this.output.lastChild;
    if (accepted) {
      const mark = document.createElement("span");
      mark.className = "accepted";
      mark.textContent = text;
      this.output.append(mark);
    } else if (last?.nodeType === Node.TEXT_NODE) {
      last.appendData(text);
    } else {
      this.output.append(text);
    }
  }

  #showSpeculation(speculation) {
    const { acceptance_rate: rate, mean_accepted_length: length, error } = speculation;
    if (rate !== null) this.#show("rate", `${(100 * rate).toFixed(0)}%`);
    if (length !== null) this.#show("length", length.toFixed(2));
    if (error) this.#note(`Went on without its drafter: ${error}`, true);
  }

  #show(name, value) {
    if (this.#cells[name].textContent !== value) this.#cells[name].textContent = value;
  }

  #stats() {
    const list = document.createElement("dl");
    list.className = "stats";
    for (const [name, label, title] of STATS) {
      const cell = document.createElement("div");
      const term = document.createElement("dt");
      const value = document.createElement("dd");
      cell.className = name;
      cell.title = title;
      term.textContent = label;
      value.textContent = NONE;
      cell.append(term, value);
      if (name === "itl") cell.append(this.#sparkline.element);
      this.#cells[name] = value;
      list.append(cell);
    }
    return list;
  }
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? 0;
}

function milliseconds(value) {
  return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`;
}
