// Values over time as stacked areas in an SVG, with their scale and the present values as text.

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, SECONDS] = [240, 60, 120];

function make(name, attributes) {
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
  constructor(figure, { least = 1, format = count } = {}) {
    Object.assign(this, { least, format, looks: [] });
    this.keys = [...figure.querySelectorAll("[data-series]")];
    this.svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": true });
    this.top = document.createElement("span");
    figure.querySelector(".plot").replaceChildren(this.svg, this.top);
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
      return make("polygon", { points: [...above, ...below].join(" "), fill: "currentColor", class: key.dataset.series });
    });
    this.svg.replaceChildren(...areas);
    this.top.textContent = this.format(top);
  }
}
