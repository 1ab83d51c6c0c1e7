// Elements, made of names, properties and children. Text becomes text nodes only.

export const byId = (id) => document.getElementById(id);

/** An element. Properties are set by their names; `data`, `aria` and `on` hold several of a kind. */
export function make(name, properties = {}, ...children) {
  const node = document.createElement(name);
  const { data = {}, aria = {}, on = {}, ...plain } = properties;
  Object.assign(node, plain);
  Object.assign(node.dataset, data);
  for (const [key, value] of Object.entries(aria)) node.setAttribute(key === "role" ? key : `aria-${key}`, value);
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function button(text, onClick, properties = {}) {
  return make("button", { type: "button", ...properties, on: { click: onClick } }, text);
}

/** Puts a text on the clipboard, and says in the button for a moment whether that worked. */
export async function copy(text, pressed) {
  pressed.dataset.label ??= pressed.textContent;
  try {
    await (navigator.clipboard ? navigator.clipboard.writeText(text) : copyBySelection(text));
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "Not allowed";
  }
  setTimeout(() => (pressed.textContent = pressed.dataset.label), 1500);
}

/** Where the page came over plain HTTP from another machine, the browser gives it no clipboard of its own. */
function copyBySelection(text) {
  const field = make("textarea", { value: text, className: "unseen" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const worked = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!worked) throw new Error("the browser does not allow it");
}

/** An id that no other conversation has, also where the page came over plain HTTP. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");
}

/** Has a text read aloud: answers as a whole, not each token. */
export function announce(text) {
  byId("announcement").textContent = text;
}

/** Tells of something at the foot of the page until the next or until it is closed; an action has [label, what to do]. */
export function tell(text, action = null) {
  const close = () => (byId("notice").hidden = true);
  const actions = action ? [button(action[0], () => (close(), action[1]()))] : [];
  byId("notice-text").textContent = text;
  byId("notice-actions").replaceChildren(...actions, button("Close", close));
  byId("notice").hidden = false;
}
