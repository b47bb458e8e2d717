// A line of the last numbers, in an SVG of fixed size.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 96;
const HEIGHT = 22;

export class Sparkline {
  #values = [];
  #length;
  #line = document.createElementNS(SVG, "polyline");

  constructor(length = 48) {
    this.#length = length;
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("class", "sparkline");
    this.element.setAttribute("aria-hidden", "true");
    this.element.append(this.#line);
  }

  push(value) {
    this.#values.push(value);
    if (this.#values.length > this.#length) this.#values.shift();
    const top = Math.max(...this.#values) || 1;
    const step = WIDTH / (this.#length - 1);
    const points = this.#values.map((each, index) => {
      const y = HEIGHT - 2 - (each / top) * (HEIGHT - 4);
      return `${(index * step).toFixed(1)},${y.toFixed(1)}`;
    });
    this.#line.setAttribute("points", points.join(" "));
  }
}
