// Values over time as stacked areas in an SVG, with their scale and unit, and the present values as text.

import { make } from "../dom.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [240, 60];
export const SECONDS = 120; // what a chart shows

function shape(name, attributes) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

export const count = (value) => Math.round(value).toLocaleString("en");
export function percent(share) {
  if (share < 1 && share >= 0.995) return "over 99%";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

/** Draws the last two minutes of the series that a figure's keys name, in their order, into its `.plot`. */
export class Chart {
  /** `unit` stands after the highest value; `least` is the lowest that the scale ends at. */
  constructor(figure, { least = 1, format = count, unit = "" } = {}) {
    Object.assign(this, { least, format, unit, looks: [] });
    this.keys = [...figure.querySelectorAll("[data-series]")];
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": true });
    this.top = make("span", { className: "top" });
    const axis = make("p", { className: "axis", ariaHidden: "true" }, make("span", {}, "2 min ago"), make("span", {}, "1 min"), make("span", {}, "now"));
    const plot = figure.querySelector(".plot");
    plot.replaceChildren(this.svg, this.top, make("span", { className: "zero" }, "0"));
    if (plot.nextElementSibling?.className === "axis") plot.nextElementSibling.remove();
    plot.after(axis);
  }

  /** `time` in seconds; `values` one for each key. */
  add(time, values) {
    // A point is a value's end: what was before it began is flat.
    if (this.looks.length === 0) this.looks.push({ time: time - 1, values });
    this.looks.push({ time, values });
    while (this.looks[1].time < time - SECONDS) this.looks.shift();
    this.keys.forEach((key, series) => (key.querySelector("b").textContent = this.format(values[series])));
    this.draw(time);
  }

  draw(now) {
    const sum = ({ values }) => values.reduce((a, b) => a + b, 0);
    const top = Math.max(this.least, ...this.looks.map(sum));
    const x = ({ time }) => (WIDTH * (1 - (now - time) / SECONDS)).toFixed(1);
    const y = (value) => (HEIGHT * (1 - value / top)).toFixed(1);
    const floor = this.looks.map(() => 0);
    const areas = this.keys.map((key, series) => {
      const below = this.looks.map((look, index) => `${x(look)},${y(floor[index])}`).reverse();
      const above = this.looks.map((look, index) => `${x(look)},${y((floor[index] += look.values[series]))}`);
      return shape("polygon", { points: [...above, ...below].join(" "), fill: "currentColor", class: key.dataset.series });
    });
    this.svg.replaceChildren(...areas);
    this.top.textContent = `${this.format(top)}${this.unit && ` ${this.unit}`}`;
  }
}
