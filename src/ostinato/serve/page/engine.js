// What the engine does, once a second, and the plan that it follows.

import { ask } from "./api.js";
import { Chart } from "./chart.js";

const byId = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
const ratio = (part, whole) => (whole > 0 ? part / whole : 0);

function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `≤ ${+(1000 * seconds).toPrecision(2)} ms` : `≤ ${seconds} s`;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
  return `${+(count / 1024 ** power).toPrecision(3)} ${units[power]}`;
}

function fill(track, parts) {
  track.replaceChildren(
    ...parts.map(([name, share]) => {
      const part = document.createElement("div");
      part.className = name;
      part.style.width = `${100 * share}%`;
      return part;
    }),
  );
}

export class Engine {
  constructor() {
    this.last = null;
    this.hasPlan = false;
    this.charts = {
      rate: new Chart(byId("rate-chart"), ["rate"]),
      batch: new Chart(byId("batch-chart"), ["running", "waiting"]),
      steps: new Chart(byId("steps-chart"), ["full", "piecewise", "eager"]),
      padding: new Chart(byId("padding-chart"), ["padding"], { least: 0.1, format: percent }),
      cache: new Chart(byId("cache-chart"), ["used", "cached"], { least: 0.02, format: percent }),
      acceptance: new Chart(byId("acceptance-chart"), ["drafts"], { format: percent }),
    };
  }

  /** One look; throws if the server does not answer. */
  async look() {
    const now = await (await ask("/live")).json();
    if (!this.hasPlan) {
      showPlan(await (await ask("/plan")).json());
      this.hasPlan = true;
    }
    if (this.last) this.show(this.last, now);
    this.last = now;
    return now;
  }

  show(before, now) {
    const seconds = Math.max(now.time - before.time, 0.001);
    const [old, stats] = [before.stats, now.stats];
    const rate = (stats.generated_tokens - old.generated_tokens) / seconds;
    byId("rate").textContent = Math.round(rate);
    byId("requests").textContent = `${stats.running} / ${stats.waiting}`;
    byId("first-token").textContent = milliseconds(now.latency.first_token.p50);
    byId("inter-token").textContent = milliseconds(now.latency.inter_token.p50);
    this.charts.rate.add([rate]);
    this.charts.batch.add([stats.running, stats.waiting]);
    const modes = ["full", "piecewise", "eager"].map((mode) => (stats.graphs.steps[mode] - old.graphs.steps[mode]) / seconds);
    this.charts.steps.add(modes);
    const padding = stats.graphs.padding - old.graphs.padding;
    this.charts.padding.add([ratio(padding, padding + stats.computed_tokens - old.computed_tokens)]);
    const reasons = Object.entries(stats.graphs.eager_reasons).map(([reason, count]) => `${count} eager: ${reason}`);
    byId("eager").textContent = reasons.join("; ");
    this.showCache(stats);
    if (stats.speculation) this.showDrafts(old.speculation, stats.speculation);
  }

  showCache({ cache, prefix_cache: prefixes }) {
    for (const kind of ["blocks", "slots"]) {
      const [used, cached, total] = ["used", "cached", "total"].map((state) => cache[`${kind}_${state}`]);
      fill(byId(kind), [["used", ratio(used, total)], ["cached", ratio(cached, total)]]);
      byId(`${kind}-text`).textContent = total ? `${used} + ${cached} of ${total}` : "none";
    }
    const total = cache.slots_total || cache.blocks_total;
    const of = cache.slots_total ? "slots" : "blocks";
    this.charts.cache.add([ratio(cache[`${of}_used`], total), ratio(cache[`${of}_cached`], total)]);
    const misses = Object.entries(prefixes.misses).filter(([, tokens]) => tokens);
    const missed = misses.reduce((sum, [, tokens]) => sum + tokens, 0);
    const share = percent(ratio(prefixes.cached_tokens, prefixes.cached_tokens + missed));
    const causes = misses.map(([cause, tokens]) => `${tokens} ${cause.replaceAll("_", " ")}`).join(", ");
    byId("prefix").textContent = `${share} of prompt tokens were cached; computed: ${causes || "none"}`;
  }

  showDrafts(old, now) {
    byId("speculation").hidden = false;
    byId("speculation-method").textContent = `${now.method}, up to ${now.num_speculative_tokens}`;
    this.charts.acceptance.add([ratio(now.drafts_accepted - old.drafts_accepted, now.drafts_proposed - old.drafts_proposed)]);
    const places = now.positions.map((each) => (each.acceptance === null ? "–" : percent(each.acceptance))).join(", ");
    byId("acceptance").textContent = `accepted by place: ${places}; decode steps by drafts: ${Object.entries(now.steps)
      .map(([drafts, count]) => `${count} with ${drafts}`)
      .join(", ")}`;
  }
}

const PARTS = { weights: "used", activations: "eager", graphs: "piecewise", cache: "running" };

function showPlan(plan) {
  const memory = plan.memory;
  fill(byId("memory"), Object.entries(PARTS).map(([part, name]) => [name, ratio(memory[part], memory.available)]));
  byId("memory-parts").replaceChildren(
    ...[...Object.keys(PARTS), "available"].map((part) => {
      const node = document.createElement("div");
      const [name, value] = [document.createElement("dt"), document.createElement("dd")];
      name.textContent = `${part} `;
      value.textContent = bytes(memory[part]);
      node.append(name, value);
      return node;
    }),
  );
  byId("decisions").replaceChildren(
    ...plan.decisions.map((decision) => {
      const row = document.createElement("tr");
      for (const value of [decision.topic, decision.requested ?? "open", decision.effective, decision.reason]) {
        const cell = document.createElement("td");
        cell.textContent = typeof value === "object" ? JSON.stringify(value) : value;
        row.append(cell);
      }
      return row;
    }),
  );
}
