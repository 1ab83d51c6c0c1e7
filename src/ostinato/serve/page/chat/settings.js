// Sampling, system prompt and tools: one drawer, checked while it is written, kept in the browser.

import { byId, make } from "../dom.js";

const KEPT = "ostinato-settings";
const FIELDS = [
  { name: "temperature", label: "Temperature", least: 0, most: 2, hint: "0 takes the most likely token" },
  { name: "top_p", label: "Top-p", above: 0, most: 1, hint: "the most likely tokens up to this probability" },
  { name: "top_k", label: "Top-k", least: 0, whole: true, hint: "chooses among so many tokens; 0: among all" },
  { name: "min_p", label: "Min-p", least: 0, most: 1, hint: "leaves out what is less likely than this part of the likeliest" },
  { name: "repetition_penalty", label: "Repetition penalty", least: 0.01, most: 100, hint: "above 1, words repeat less" },
  { name: "max_completion_tokens", label: "Max tokens", least: 1, whole: true, hint: "where an answer is cut; Continue goes on", begin: "1024" },
  { name: "seed", label: "Seed", least: 0, whole: true, hint: "the same seed gives the same answer" },
];

/** What is wrong with a field's text; "" if nothing is. */
function problem({ label, least, above, most, whole }, text) {
  if (text === "") return "";
  const value = Number(text);
  const kind = whole ? "a whole number" : "a number";
  const from = above !== undefined ? ` above ${above}` : ` from ${least}`;
  const range = most === undefined ? `${from}${above === undefined ? " on" : ""}` : `${from} to ${most}`;
  const isOutside = value < (least ?? -Infinity) || value <= (above ?? -Infinity) || value > (most ?? Infinity);
  const isWrong = !Number.isFinite(value) || (whole && !Number.isSafeInteger(value)) || isOutside;
  return isWrong ? `${label} is ${kind}${range}` : "";
}

function toolProblem(text) {
  if (!text.trim()) return "";
  try {
    const tools = JSON.parse(text);
    const isTool = (each) => each?.type === "function" && typeof each.function?.name === "string";
    if (Array.isArray(tools) && tools.every(isTool)) return "";
    return 'Tools are a list of {"type": "function", "function": {"name": ...}}';
  } catch (error) {
    return `Tools are JSON: ${error.message}`;
  }
}

export class Settings {
  constructor() {
    this.inputs = new Map();
    this.defaults = {};
    byId("sampling").append(...FIELDS.map((field) => this.field(field)));
    for (const name of ["system", "tools"]) byId(name).addEventListener("input", () => this.changed());
    // The sheet lies over the chat: a press beside it closes it.
    document.addEventListener("pointerdown", (event) => byId("settings").contains(event.target) || this.close());
    this.restore();
    this.check();
  }

  /** Closes the sheet; returns whether it was open. */
  close() {
    const sheet = byId("settings");
    const wasOpen = sheet.open;
    if (wasOpen && sheet.contains(document.activeElement)) sheet.querySelector("summary").focus();
    sheet.open = false;
    return wasOpen;
  }

  field(field) {
    const { name, label, hint, whole, begin } = field;
    const id = name.replaceAll("_", "-");
    const inputMode = whole ? "numeric" : "decimal";
    const input = make("input", { id, inputMode, autocomplete: "off", value: begin ?? "", placeholder: "as the model's" });
    input.setAttribute("aria-describedby", `${id}-note`);
    input.addEventListener("input", () => this.changed());
    this.inputs.set(field, input);
    const note = make("small", { id: `${id}-note`, data: { hint } }, hint);
    return make("div", { className: "field" }, make("label", { htmlFor: id }, label), input, note);
  }

  /** What the model takes, and what holds where nothing is given. */
  know({ sampling, chat_sampling: ours, max_model_len: longest, takes_tools: takesTools }) {
    this.defaults = ours;
    for (const [field, input] of this.inputs) {
      if (field.name in sampling) input.placeholder = String(sampling[field.name]);
      if (field.name in ours) {
        input.placeholder = String(ours[field.name]);
        byId(`${input.id}-note`).dataset.hint = `${field.hint}; ours, for the model has none`;
      }
      if (field.name === "max_completion_tokens") {
        field.most = longest;
        if (input.value === field.begin && Number(input.value) > longest) input.value = "";
        input.placeholder = "as many as fit";
      }
      if (field.name === "seed") input.placeholder = "none";
    }
    byId("tools-field").hidden = !takesTools;
    this.takesTools = takesTools;
    this.check();
  }

  changed() {
    this.check();
    const kept = { system: byId("system").value, tools: byId("tools").value };
    for (const [{ name }, input] of this.inputs) kept[name] = input.value;
    try {
      localStorage.setItem(KEPT, JSON.stringify(kept));
    } catch {
      // They hold until the page is closed.
    }
  }

  restore() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      // as if there were none
    }
    for (const [{ name }, input] of this.inputs) if (typeof kept[name] === "string") input.value = kept[name];
    for (const name of ["system", "tools"]) if (typeof kept[name] === "string") byId(name).value = kept[name];
  }

  /** Shows what is wrong; the first wrong input, or null. */
  check() {
    let first = null;
    const mark = (input, note, text, hint) => {
      input.ariaInvalid = String(Boolean(text));
      note.textContent = text || hint;
      note.classList.toggle("wrong", Boolean(text));
      if (text) first ??= input;
    };
    for (const [field, input] of this.inputs) {
      const note = byId(`${input.id}-note`);
      mark(input, note, problem(field, input.value.trim()), note.dataset.hint);
    }
    mark(byId("tools"), byId("tools-note"), this.takesTools ? toolProblem(byId("tools").value) : "", byId("tools-note").dataset.hint);
    const set = [...this.inputs].filter(([{ begin }, input]) => input.value.trim() !== (begin ?? ""));
    const told = set.map(([{ label }, input]) => `${label.toLowerCase()} ${input.value.trim()}`);
    if (byId("system").value.trim()) told.push("system prompt");
    if (this.takesTools && byId("tools").value.trim()) told.push("tools");
    byId("settings-told").textContent = first ? "something is wrong" : told.join(" · ");
    return first;
  }

  /** Whether a question can be asked; if not, the drawer shows what is wrong. */
  isRight() {
    const wrong = this.check();
    if (!wrong) return true;
    byId("settings").open = true;
    wrong.focus();
    return false;
  }

  get system() {
    return byId("system").value.trim();
  }

  /** The fields of a request. */
  request() {
    const body = { ...this.defaults };
    for (const [{ name }, input] of this.inputs) if (input.value.trim()) body[name] = Number(input.value);
    if (this.takesTools && byId("tools").value.trim()) body.tools = JSON.parse(byId("tools").value);
    return body;
  }
}
