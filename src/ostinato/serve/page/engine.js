// What the engine does, once a second, and the plan that it follows.

import { ask } from "./api.js";
import { Chart, count, percent } from "./chart.js";
import { fill, showPlan } from "./plan.js";

const byId = (id) => document.getElementById(id);
const ratio = (part, whole) => (whole > 0 ? part / whole : 0);
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
const MODES = ["full", "piecewise", "eager"];

/** A quantile, known as a bound. */
function atMost(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `≤ ${+(1000 * seconds).toPrecision(2)} ms` : `≤ ${seconds} s`;
}

export class Engine {
  constructor() {
    this.begin();
  }

  /** Nothing was seen yet. */
  begin() {
    const chart = (name, options) => new Chart(byId(`${name}-figure`), options);
    const share = (least) => ({ least, format: percent });
    this.last = null;
    this.charts = {
      rate: chart("rate"),
      batch: chart("batch"),
      steps: chart("steps"),
      padding: chart("padding", share(0.1)),
      cache: chart("cache", share(0.01)),
      drafts: chart("drafts", share(1)),
    };
  }

  /** One look; throws if the server does not answer. */
  async look() {
    const now = await (await ask("/live")).json();
    if (this.last && now.time < this.last.time + 0.001) this.begin(); // another server than before
    if (this.last && now.stats.steps < this.last.stats.steps) this.begin();
    if (this.last) this.show(this.last, now);
    else showPlan(await (await ask("/plan")).json());
    this.last = now;
    return now;
  }

  show(before, now) {
    const { time } = now;
    const [old, stats] = [before.stats, now.stats];
    const perSecond = (value, past) => (value - past) / (time - before.time);
    const rate = perSecond(stats.generated_tokens, old.generated_tokens);
    byId("rate").textContent = count(rate);
    byId("running").textContent = `${stats.running} of ${now.max_num_seqs}`;
    byId("waiting").textContent = stats.waiting;
    byId("finished").textContent = count(sum(stats.finished));
    byId("first-token").textContent = atMost(now.latency.first_token.p50);
    byId("inter-token").textContent = atMost(now.latency.inter_token.p50);
    this.charts.rate.add(time, [rate]);
    this.charts.batch.add(time, [stats.running, stats.waiting]);
    this.charts.steps.add(time, MODES.map((mode) => perSecond(stats.graphs.steps[mode], old.graphs.steps[mode])));
    const padding = stats.graphs.padding - old.graphs.padding;
    this.charts.padding.add(time, [ratio(padding, padding + stats.computed_tokens - old.computed_tokens)]);
    this.showSteps(stats);
    this.showCache(time, stats);
    if (stats.speculation) this.showDrafts(time, old.speculation, stats.speculation);
  }

  showSteps({ steps, computed_tokens: tokens, graphs }) {
    const hits = graphs.steps.full + graphs.steps.piecewise;
    const reasons = Object.entries(graphs.eager_reasons).map(([reason, times]) => `${count(times)} (${reason})`);
    const eager = reasons.length ? ` Run eagerly: ${reasons.join(", ")}.` : "";
    byId("steps-text").textContent = `Since the start ${percent(ratio(hits, steps))} of ${count(steps)} steps replayed a graph.${eager}`;
    byId("padding-text").textContent = `Since the start ${percent(ratio(graphs.padding, graphs.padding + tokens))}.`;
  }

  showCache(time, { cache, prefix_cache: prefixes }) {
    for (const kind of ["blocks", "slots"]) {
      const [used, cached, total] = ["used", "cached", "total"].map((state) => cache[`${kind}_${state}`]);
      fill(byId(kind), [["used", ratio(used, total)], ["cached", ratio(cached, total)]]);
      byId(`${kind}-text`).textContent = total ? `${count(used)} in use, ${count(cached)} kept, of ${count(total)}` : "none in this model";
    }
    const of = cache.slots_total ? "slots" : "blocks";
    const total = cache[`${of}_total`];
    byId("cache-of").textContent = of;
    this.charts.cache.add(time, [ratio(cache[`${of}_used`], total), ratio(cache[`${of}_cached`], total)]);
    const misses = Object.entries(prefixes.misses).filter(([, tokens]) => tokens);
    const share = percent(ratio(prefixes.cached_tokens, prefixes.cached_tokens + sum(prefixes.misses)));
    const causes = misses.map(([cause, tokens]) => `${count(tokens)} ${cause.replaceAll("_", " ")}`).join(", ");
    byId("prefix").textContent = `Since the start ${share} of prompt tokens came from the cache. Computed: ${causes || "none"}.`;
  }

  showDrafts(time, old, now) {
    byId("drafts-figure").hidden = false;
    this.charts.drafts.add(time, [ratio(now.drafts_accepted - old.drafts_accepted, now.drafts_proposed - old.drafts_proposed)]);
    const places = now.positions.map(({ acceptance }) => (acceptance === null ? "–" : percent(acceptance))).join(", ");
    const steps = Object.entries(now.steps).map(([drafts, times]) => `${count(times)} with ${drafts} drafts`).join(", ");
    byId("drafts-text").textContent = `${now.method}, up to ${now.num_speculative_tokens} ahead. Right, by place: ${places}. Steps: ${steps}.`;
  }
}
