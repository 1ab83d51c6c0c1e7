// What the engine does, look after look, and the plan that it follows.

import { ask } from "../api.js";
import { byId } from "../dom.js";
import { Chart, SECONDS, count, percent } from "./chart.js";
import { bytes, fill, showPlan } from "./plan.js";
import { Prefixes } from "./prefixes.js";

const ratio = (part, whole) => (whole > 0 ? part / whole : 0);
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
const MODES = ["full", "piecewise", "eager"];
const LATELY = 1; // seconds that the present speed averages over

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
    this.looks = [];
    this.plan = null;
    this.prefixes = new Prefixes();
    this.charts = {
      rate: chart("rate", { least: 10, unit: "tokens/s" }),
      batch: chart("batch", { least: 2, unit: "at once" }),
      steps: chart("steps", { least: 10, unit: "steps/s" }),
      padding: chart("padding", share(0.1)),
      cache: chart("cache", share(0.01)),
      drafts: chart("drafts", share(1)),
    };
  }

  /** Whether answers are being computed, or wait. */
  get isBusy() {
    return Boolean(this.last) && this.last.stats.running + this.last.stats.waiting > 0;
  }

  /** One look; throws if the server does not answer. */
  async look() {
    const now = await (await ask("/live")).json();
    if (this.last && now.time < this.last.time + 0.001) this.begin(); // another server than before
    if (this.last && now.stats.steps < this.last.stats.steps) this.begin();
    const before = this.last;
    if (!before) {
      this.plan = await (await ask("/plan")).json();
      showPlan(this.plan);
    }
    this.last = now;
    this.looks.push(now);
    while (this.looks[0].time < now.time - SECONDS) this.looks.shift();
    if (before) this.show(before, now);
    await this.prefixes.look(now);
    return now;
  }

  show(before, now) {
    const { time } = now;
    const [old, stats] = [before.stats, now.stats];
    const perSecond = (value, past) => (value - past) / (time - before.time);
    this.showSpeed(now);
    byId("finished").textContent = count(sum(stats.finished));
    byId("first-token").textContent = atMost(now.latency.first_token.p50);
    byId("inter-token").textContent = atMost(now.latency.inter_token.p50);
    this.charts.rate.add(time, [perSecond(stats.generated_tokens, old.generated_tokens)]);
    this.charts.batch.add(time, [stats.running, stats.waiting]);
    this.charts.steps.add(time, MODES.map((mode) => perSecond(stats.graphs.steps[mode], old.graphs.steps[mode])));
    const padding = stats.graphs.padding - old.graphs.padding;
    this.charts.padding.add(time, [ratio(padding, padding + stats.computed_tokens - old.computed_tokens)]);
    this.showSteps(stats);
    this.showCache(time, stats);
    this.showFiles(stats);
    if (stats.speculation) this.showDrafts(time, old.speculation, stats.speculation);
  }

  showSpeed({ time, stats, max_num_seqs: most }) {
    byId("engine").dataset.busy = this.isBusy;
    byId("state").textContent = this.isBusy ? "Running" : "Idle";
    byId("running").textContent = `${stats.running} of ${most}`;
    byId("waiting").textContent = stats.waiting;
    const lately = this.looks.findLast((look) => look.time <= time - LATELY) ?? this.looks[0];
    const tokens = stats.generated_tokens - lately.stats.generated_tokens;
    byId("rate").textContent = tokens || this.isBusy ? count(tokens / (time - lately.time)) : "idle";
    const first = this.looks[0].stats;
    const seconds = stats.step_seconds - first.step_seconds;
    const computed = stats.generated_tokens - first.generated_tokens;
    byId("step-rate").textContent = computed ? count(computed / seconds) : "idle";
  }

  showSteps({ steps, computed_tokens: tokens, graphs }) {
    const hits = graphs.steps.full + graphs.steps.piecewise;
    const reasons = Object.entries(graphs.eager_reasons).map(([reason, times]) => `${count(times)} (${reason})`);
    const eager = reasons.length ? ` Run eagerly: ${reasons.join(", ")}.` : "";
    byId("steps-text").textContent = `Since the start ${percent(ratio(hits, steps))} of ${count(steps)} steps replayed a graph.${eager}`;
    byId("padding-text").textContent = `Since the start ${percent(ratio(graphs.padding, graphs.padding + tokens))}.`;
  }

  showCache(time, { cache, prefix_cache: prefixes }) {
    byId("window-blocks-figure").hidden = !cache.window_blocks_total;
    for (const kind of ["blocks", "window-blocks", "slots"]) {
      const [used, cached, total] = ["used", "cached", "total"].map((state) => cache[`${kind}_${state}`]);
      fill(byId(kind), [["used", ratio(used, total)], ["cached", ratio(cached, total)]]);
      byId(`${kind}-text`).textContent = total ? `${count(used)} in use, ${count(cached)} kept, of ${count(total)}` : "none in this model";
    }
    const of = ["slots", "blocks", "window-blocks"].find((kind) => cache[`${kind}_total`]) ?? "blocks";
    const total = cache[`${of}_total`];
    byId("cache-of").textContent = of;
    this.charts.cache.add(time, [ratio(cache[`${of}_used`], total), ratio(cache[`${of}_cached`], total)]);
    const misses = Object.entries(prefixes.misses).filter(([, tokens]) => tokens);
    const share = percent(ratio(prefixes.cached_tokens, prefixes.cached_tokens + sum(prefixes.misses)));
    const causes = misses.map(([cause, tokens]) => `${count(tokens)} ${cause.replaceAll("_", " ")}`).join(", ");
    byId("prefix").textContent = `Since the start ${share} of prompt tokens came from the cache. Computed: ${causes || "none"}.`;
  }

  showFiles({ cache_files: files, prefix_cache: prefixes }) {
    byId("files-figure").hidden = !files;
    if (!files) return;
    const { limit, pays_from: from } = this.plan.cache_files;
    fill(byId("files-used"), [["cached", ratio(files.bytes, limit)]]);
    byId("files-text").textContent = `${count(files.files)} files, ${bytes(files.bytes)} of ${bytes(limit)}`;
    const wrong = ["dropped", "failed", "damaged"].filter((each) => files[each]).map((each) => `${count(files[each])} ${each}`);
    const pays = from === null ? "No prefix is read sooner than computed." : `They are read from ${count(from)} tokens on, where that is faster than computing.`;
    byId("files-told").textContent =
      `Since the start ${count(files.written)} written (${bytes(files.written_bytes)}), ${count(files.read)} read (${bytes(files.read_bytes)}), ` +
      `${count(files.removed)} removed; ${count(prefixes.file_tokens)} prompt tokens came from them.${wrong.length ? ` Lost: ${wrong.join(", ")}.` : ""} ${pays}`;
  }

  showDrafts(time, old, now) {
    byId("drafts-figure").hidden = false;
    this.charts.drafts.add(time, [ratio(now.drafts_accepted - old.drafts_accepted, now.drafts_proposed - old.drafts_proposed)]);
    const places = now.positions.map(({ acceptance }) => (acceptance === null ? "–" : percent(acceptance))).join(", ");
    const steps = Object.entries(now.steps).map(([drafts, times]) => `${count(times)} with ${drafts} drafts`).join(", ");
    byId("drafts-text").textContent = `${now.method}, up to ${now.num_speculative_tokens} ahead. Right, by place: ${places}. Steps: ${steps}.`;
  }
}
