// A picture of the prefix index: a row for each text that it used last, from where it leaves the rows above it.

import { ask } from "../api.js";
import { byId, make } from "../dom.js";
import { count } from "./chart.js";

const PERIOD = 1; // seconds between two pictures, at least

const plural = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

/** [branch, depth] so that each stands below the one that it leaves. */
function ordered(branches) {
  const found = [];
  const visit = (parent, depth) =>
    branches.forEach((branch, number) => {
      if (branch.parent !== parent) return;
      found.push([branch, depth]);
      visit(number, depth + 1);
    });
  visit(null, 0);
  return found;
}

function place(className, from, to, whole) {
  const node = make("i", { className });
  node.style.left = `${(100 * from) / whole}%`;
  if (to !== null) node.style.width = `max(3px, ${(100 * (to - from)) / whole}%)`;
  return node;
}

function words({ begin, end, is_used: isUsed, marks }) {
  const checkpoints = marks.filter((mark) => mark.is_checkpoint).length;
  const hits = marks.reduce((sum, mark) => sum + mark.hits, 0);
  const parts = [begin ? `${count(end)} tokens, the first ${count(begin)} as above` : plural(end, "token")];
  if (checkpoints) parts.push(plural(checkpoints, "checkpoint"));
  parts.push(hits ? `hit ${hits === 1 ? "once" : `${count(hits)} times`}` : "not hit yet");
  if (isUsed) parts.push("in use");
  return parts.join(", ");
}

function row([branch, depth], whole) {
  const { begin, end, is_used: isUsed, marks } = branch;
  const bar = make("div", { className: "branch", ariaHidden: "true" });
  if (begin) bar.append(place("shared", 0, begin, whole));
  bar.append(place(isUsed ? "own used" : "own cached", begin, end, whole));
  for (const { at, hits, is_checkpoint: isCheckpoint } of marks) {
    bar.append(place(`mark ${isCheckpoint ? "checkpoint" : "block"} ${hits ? "hit" : ""}`, at, null, whole));
  }
  return make("li", { data: { depth } }, bar, make("span", {}, words(branch)));
}

export class Prefixes {
  constructor() {
    this.last = null;
    this.time = -Infinity;
  }

  /** Looks at the index if a step has changed it since the last look. */
  async look({ time, stats }) {
    const isNew = this.last !== stats.steps;
    if (!isNew || time - this.time < PERIOD) return;
    this.time = time;
    const shown = await (await ask("/prefixes")).json();
    this.last = stats.steps;
    this.show(shown);
  }

  show({ texts, blocks, checkpoints, branches }) {
    const whole = Math.max(1, ...branches.map(({ end }) => end));
    byId("prefix-rows").replaceChildren(...ordered(branches).map((each) => row(each, whole)));
    byId("prefix-axis").hidden = !branches.length;
    byId("prefix-axis").lastElementChild.textContent = `${count(whole)} tokens`;
    const more = texts > branches.length ? ` The ${branches.length} used last are shown.` : "";
    byId("prefix-told").textContent = texts
      ? `${plural(texts, "text")} in ${plural(blocks, "block")}${checkpoints ? `, with ${plural(checkpoints, "checkpoint")}` : ""}.${more}`
      : "Empty: no text has been kept yet.";
  }
}
