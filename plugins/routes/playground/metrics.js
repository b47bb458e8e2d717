// What the engine is doing now, read from /metrics every second.

import { metrics } from "./api.js";
import { Sparkline } from "./sparkline.js";

const PERIOD_MS = 1000;
const AFTER_ERROR_MS = 5000;
const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const NONE = "\u2013";

/** Samples of Prometheus's text format: [{name, labels, value}]. */
export function parse(text) {
  return text
    .split("\n")
    .map((line) => LINE.exec(line))
    .filter(Boolean)
    .map(([, name, labels = "", value]) => ({
      name,
      labels: Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, given]) => [key, given])),
      value: Number(value),
    }));
}

export class LiveMetrics {
  #root;
  #timer = 0;
  #isPaused = false;
  #before = null;
  #sparkline = new Sparkline();

  constructor(root) {
    this.#root = root;
    this.#cell("speed").after(this.#sparkline.element);
    const pause = root.querySelector("button");
    pause.addEventListener("click", () => {
      this.#isPaused = !this.#isPaused;
      pause.setAttribute("aria-pressed", String(this.#isPaused));
      this.#schedule(0);
    });
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  start() {
    this.#schedule(0);
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    if (!this.#isPaused && !document.hidden) this.#timer = setTimeout(() => this.#poll(), delay);
  }

  async #poll() {
    const problem = this.#root.querySelector(".problem");
    try {
      this.#show(parse(await metrics()));
      problem.textContent = "";
      this.#schedule(PERIOD_MS);
    } catch (error) {
      problem.textContent = error.message;
      this.#schedule(AFTER_ERROR_MS);
    }
  }

  #show(samples) {
    const sum = (name) => {
      const found = samples.filter((sample) => sample.name === name);
      return found.length ? found.reduce((total, sample) => total + sample.value, 0) : null;
    };
    this.#write("running", sum("vllm:num_requests_running"));
    this.#write("waiting", sum("vllm:num_requests_waiting"));
    const usage = sum("vllm:kv_cache_usage_perc");
    this.#write("usage", usage === null ? null : `${(100 * usage).toFixed(1)}%`);
    this.#showSpeed(sum("vllm:generation_tokens_total"));
    this.#showDrafters(samples);
  }

  #showSpeed(total) {
    if (total === null) return;
    const now = performance.now();
    if (this.#before !== null && now > this.#before.time) {
      const speed = Math.max(0, (1000 * (total - this.#before.total)) / (now - this.#before.time));
      this.#write("speed", speed.toFixed(speed < 10 ? 1 : 0));
      this.#sparkline.push(speed);
    }
    this.#before = { time: now, total };
  }

  #showDrafters(samples) {
    const counts = (name) =>
      new Map(samples.filter((each) => each.name === name).map((each) => [each.labels.drafter, each.value]));
    const drafted = counts("vllm:spec_decode_num_draft_tokens_total");
    const accepted = counts("vllm:spec_decode_num_accepted_tokens_total");
    const rates = [...drafted]
      .filter(([, count]) => count > 0)
      .map(([drafter, count]) => `${drafter} ${((100 * (accepted.get(drafter) ?? 0)) / count).toFixed(0)}%`);
    this.#write("drafters", rates.join("  \u00b7  ") || null);
  }

  #cell(name) {
    return this.#root.querySelector(`[data-value="${name}"]`);
  }

  #write(name, value) {
    this.#cell(name).textContent = value === null ? NONE : String(value);
  }
}
