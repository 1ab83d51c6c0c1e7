// Messages on the page: a question, an answer, what a tool gave.

import { button, byId, copy, make } from "../dom.js";
import { codeBlock } from "../text/code.js";
import { Growing } from "../text/markdown.js";
import { pictureOf } from "./images.js";

function article(kind, label) {
  return make("article", { className: `message ${kind}`, ariaLabel: label });
}

/** A question. `onEdit` gets the new text; null: it cannot be edited. */
export function questionNode({ text, images }, onEdit) {
  const node = article("user", "Question");
  const pictures = (images ?? []).map((address, index) => pictureOf(address, `Picture ${index + 1}`));
  const body = make("div", { className: "body" });
  if (pictures.length) body.append(make("div", { className: "pictures" }, ...pictures));
  if (text) body.append(make("div", { className: "text" }, text));
  const edit = () => editIn(node, text, onEdit);
  const actions = make("div", { className: "actions" }, button("Copy", (event) => copy(text, event.currentTarget)));
  actions.append(button("Edit", edit, { className: "edit" }));
  node.append(body, actions);
  return node;
}

function editIn(node, text, onEdit) {
  const old = [...node.childNodes];
  const field = make("textarea", { value: text, rows: 3, ariaLabel: "The question, to be changed" });
  const back = () => {
    node.replaceChildren(...old);
    node.querySelector(".edit").focus();
  };
  const form = make(
    "form",
    { className: "editing", on: { submit: (event) => (event.preventDefault(), field.value.trim() && onEdit(field.value.trim())) } },
    field,
    make("p", { className: "note" }, "What follows it is replaced."),
    make("div", { className: "actions" }, make("button", { className: "primary" }, "Ask again"), button("Cancel", back)),
  );
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    back();
  });
  node.replaceChildren(form);
  field.focus();
}

const isAtEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 80;

/** Changes the log. Who reads its end goes on to see it. */
function follow(change) {
  const log = byId("messages");
  const follows = isAtEnd(log);
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

/** Who reads the end of the log goes on to see it where a longer question, a keyboard or a turn takes room from it. */
export function keepEnd(log) {
  let follows = true;
  log.addEventListener("scroll", () => (follows = isAtEnd(log)));
  new ResizeObserver(() => follows && (log.scrollTop = log.scrollHeight)).observe(log);
}

/** An answer, which may still be coming. */
export class AnswerNode {
  /** `onContinue` goes on with the answer, if it is the last one and was cut. */
  constructor(message, onRegenerate, onContinue) {
    this.message = message;
    this.onContinue = onContinue;
    this.node = article("assistant", "Answer");
    this.text = make("div", { className: "text" });
    this.growing = new Growing(this.text);
    this.calls = make("div", { className: "calls" });
    this.onRegenerate = onRegenerate;
    this.node.append(this.text, this.calls);
    this.wait = 0;
    this.last = 0;
    this.planned = false;
  }

  /** Draws soon: at most once a frame, and less often where a drawing takes long, so that the page stays quick. */
  drawSoon() {
    if (this.planned) return;
    this.planned = true;
    const later = Math.max(0, this.last + this.wait - performance.now());
    setTimeout(() => requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    }), later);
  }

  draw() {
    const begin = performance.now();
    follow(() => {
      this.growing.show(this.message.text);
      this.drawReasoning();
      this.drawCalls();
    });
    this.last = performance.now();
    this.wait = 3 * (this.last - begin);
  }

  drawReasoning() {
    const { reasoning, text } = this.message;
    if (!reasoning) return;
    if (!this.reasoning) {
      this.reasoning = make("div", {});
      this.details = make("details", { className: "reasoning", open: !text }, make("summary", {}, "Reasoning"), this.reasoning);
      this.node.prepend(this.details);
    }
    if (text && !this.hasText) this.details.open = false; // folded once the answer begins
    this.hasText = Boolean(text);
    const shown = this.reasoning.textContent;
    if (reasoning.startsWith(shown)) this.reasoning.append(reasoning.slice(shown.length));
    else this.reasoning.textContent = reasoning;
  }

  drawCalls() {
    const key = JSON.stringify(this.message.calls);
    if (key === this.drawnCalls) return;
    this.drawnCalls = key;
    this.calls.replaceChildren(...this.message.calls.map(callNode));
  }

  /** It has ended: what it says of itself, and what can be done with it. */
  end() {
    this.draw();
    this.node.classList.remove("coming");
    const { text, cut } = this.message;
    const copying = button("Copy", (event) => copy(text, event.currentTarget));
    const again = button("Regenerate", this.onRegenerate, { className: "regenerate" });
    const more = cut && text && this.onContinue ? [button("Continue", this.onContinue, { className: "continue" })] : [];
    follow(() => this.node.append(factsOf(this.message), make("div", { className: "actions" }, ...more, copying, again)));
  }
}

/** How long and how fast an answer was; the rest while the mouse is over it, or once it is pressed. */
function factsOf({ facts, details }) {
  if (!details) return make("p", { className: "facts" }, facts ?? "");
  return make("details", { className: "facts", title: details.replaceAll(" · ", "\n") }, make("summary", {}, facts || "details"), make("p", {}, details));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete, or no JSON
  }
}

function callNode({ name, arguments: given }) {
  return make("section", { className: "call", ariaLabel: `Call of ${name}` }, make("p", {}, "calls ", make("b", {}, name)), codeBlock(pretty(given), "json"));
}

/** What a tool gave. */
export function resultNode({ name, text }) {
  const node = article("tool", `Result of ${name}`);
  node.append(make("details", {}, make("summary", {}, `Result of ${name}`), codeBlock(pretty(text), "json")));
  return node;
}

/** Asks for what the tools give; `onResults` gets a text for each call. */
export function resultForm(calls, onResults) {
  const fields = calls.map(({ name }) => make("textarea", { rows: 2, required: true, ariaLabel: `What ${name} gives` }));
  const rows = calls.map(({ name }, index) => make("label", { className: "field" }, `What ${name} gives`, fields[index]));
  const submit = (event) => {
    event.preventDefault();
    onResults(fields.map(({ value }) => value));
  };
  return make("form", { className: "results", on: { submit } }, ...rows, make("div", { className: "actions" }, make("button", { className: "primary" }, "Send results")));
}
