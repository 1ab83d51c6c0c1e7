// Values over time as stacked areas in an SVG.

const NAMESPACE = "http://www.w3.org/2000/svg";

function make(name, attributes) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** Keeps the last `length` values of some series and draws them on top of each other. */
export class Chart {
  constructor(svg, names, { length = 120, least = 1, format = (value) => `${Math.round(value)}` } = {}) {
    Object.assign(this, { svg, names, length, least, format, values: [] });
    svg.setAttribute("viewBox", "0 0 240 64");
    svg.setAttribute("preserveAspectRatio", "none");
  }

  add(values) {
    this.values.push(values);
    if (this.values.length > this.length) this.values.shift();
    this.draw();
  }

  draw() {
    const sums = this.values.map((values) => values.reduce((a, b) => a + b, 0));
    const top = Math.max(this.least, ...sums);
    const x = (index) => 240 - ((this.values.length - 1 - index) * 240) / (this.length - 1);
    const y = (value) => 63 - (value / top) * 58;
    const nodes = [];
    const floor = this.values.map(() => 0);
    this.names.forEach((name, series) => {
      const below = this.values.map((_, index) => `${x(index)},${y(floor[index])}`).reverse();
      const above = this.values.map((values, index) => `${x(index)},${y((floor[index] += values[series]))}`);
      nodes.push(make("polygon", { points: [...above, ...below].join(" "), fill: "currentColor", class: name, opacity: 0.75 }));
    });
    const title = make("title", {});
    title.textContent = this.names.map((name, i) => `${name} ${this.format(this.values.at(-1)[i])}`).join(", ");
    this.svg.replaceChildren(title, ...nodes);
    this.svg.dataset.top = this.format(top);
  }
}
