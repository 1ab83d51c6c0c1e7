// The list of conversations: opened, exported, deleted, read from files.

import { button, byId, make, tell } from "../dom.js";
import { asFile, download, fromFile } from "./exchange.js";
import { Store } from "./store.js";

const TITLE = 200; // characters of a name
const KEPT_NOT = "This conversation is not kept";

function because(error) {
  if (error?.name === "QuotaExceededError") return "the browser has no more room. Export or delete others.";
  return `the browser keeps nothing here (${error?.message ?? error}).`;
}

/** Whether the name or a text of a conversation holds these words, in small letters. */
function has({ title, messages }, words) {
  return [title, ...messages.map(({ text }) => text)].some((text) => text.toLowerCase().includes(words));
}

export class History {
  /** `onOpen` gets a conversation, `onNew` is told to begin one, `onRename` gets an id and the new name. */
  constructor({ onOpen, onNew, onRename }) {
    Object.assign(this, { onOpen, onNew, onRename, store: new Store(), current: null, renaming: null, writing: Promise.resolve(), gone: new Set() });
    byId("new").addEventListener("click", () => this.begin());
    byId("search").addEventListener("input", () => this.show());
    byId("export").addEventListener("click", () => this.exportAll());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.read(event.target));
    byId("delete-all").addEventListener("click", () => byId("sure").showModal());
    byId("sure").addEventListener("close", () => byId("sure").returnValue === "yes" && this.clear());
  }

  /** Shows the list, and the conversation that the address names. */
  async start() {
    await this.show();
    const id = /^#c=([\w-]+)$/.exec(location.hash)?.[1];
    if (id) await this.open(id);
  }

  begin() {
    this.mark(null);
    this.onNew();
  }

  mark(id) {
    this.current = id;
    history.replaceState(null, "", id ? `#c=${id}` : location.pathname + location.search);
    for (const row of byId("conversations").children) row.querySelector(".open").ariaCurrent = String(row.dataset.id === id);
  }

  /** Keeps a conversation, one write after the other. `isOpen` tells whether it is still the one that is shown. */
  keep(conversation, isOpen = () => false) {
    if (this.gone.has(conversation.id)) return this.writing; // deleted while its answer came
    const copy = structuredClone(conversation);
    this.writing = this.writing.then(() => this.store.put(copy)).then(
      () => {
        if (isOpen()) this.mark(copy.id);
        return this.show();
      },
      (error) => tell(`${KEPT_NOT}: ${because(error)}`),
    );
    return this.writing;
  }

  async show() {
    try {
      const heads = await this.store.heads();
      const words = byId("search").value.trim().toLowerCase();
      const found = words ? (await this.store.all()).filter((each) => has(each, words)) : heads;
      if (words !== byId("search").value.trim().toLowerCase()) return; // more was written meanwhile
      if (this.renaming?.isConnected) return; // the list is shown anew when that ends
      byId("conversations").replaceChildren(...found.map((head) => this.row(head)));
      byId("none-kept").hidden = heads.length > 0;
      byId("none-found").hidden = !heads.length || found.length > 0;
      byId("search").hidden = !heads.length;
      for (const name of ["export", "delete-all"]) byId(name).disabled = !heads.length;
    } catch (error) {
      tell(`Conversations are not kept: ${because(error)}`);
    }
  }

  row({ id, title, model, changed }) {
    const name = title || "a conversation";
    const when = new Date(changed).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
    const opening = button(name, () => this.open(id), { className: "open", title: `${name}\n${model}, ${when}`, ariaCurrent: String(id === this.current) });
    const rename = button("✎", (event) => this.rename(id, name, event.currentTarget.parentElement), { className: "small", title: "Rename", ariaLabel: `Rename: ${name}` });
    const out = button("↓", () => this.exportOne(id), { className: "small", title: "Export", ariaLabel: `Export: ${name}` });
    const away = button("×", () => this.remove(id), { className: "small", title: "Delete", ariaLabel: `Delete: ${name}` });
    return make("li", { data: { id } }, opening, rename, out, away);
  }

  /** Puts a field in place of the row's name. Enter, or a press elsewhere, keeps what it holds; Escape does not. */
  rename(id, name, row) {
    const field = make("input", { value: name, maxLength: TITLE, ariaLabel: `The name of: ${name}` });
    const opening = row.firstChild;
    let isOver = false;
    const end = async (title, isLeft) => {
      if (isOver) return;
      isOver = true;
      this.renaming = null;
      if (title && title !== name) {
        const conversation = await this.store.get(id);
        if (conversation) await this.keep({ ...conversation, title });
        this.onRename(id, title);
      }
      if (field.isConnected) field.replaceWith(opening);
      await this.show();
      if (!isLeft) byId("conversations").querySelector(`[data-id="${id}"] .open`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter" ? field.value.trim() : "", false);
    });
    field.addEventListener("blur", () => end(field.value.trim(), true));
    this.renaming = field;
    opening.replaceWith(field);
    field.focus();
    field.select();
  }

  async open(id) {
    const conversation = await this.store.get(id).catch(() => null);
    if (!conversation) return tell("This conversation is not kept in this browser any more.");
    this.mark(id);
    this.onOpen(conversation);
  }

  async exportOne(id) {
    const conversation = await this.store.get(id);
    download(asFile([conversation]), `${(conversation.title || "conversation").replace(/[^\w-]+/g, "-").slice(0, 40)}.json`);
  }

  async exportAll() {
    download(asFile(await this.store.all()), "conversations.json");
  }

  async remove(id) {
    const conversation = await this.store.get(id);
    this.gone.add(id);
    await this.store.remove(id);
    if (this.current === id) this.begin();
    await this.show();
    tell(`Deleted: ${conversation?.title || "a conversation"}`, ["Undo", () => this.bringBack(conversation)]);
  }

  async bringBack(conversation) {
    this.gone.delete(conversation.id);
    await this.keep(conversation);
    await this.open(conversation.id);
  }

  async clear() {
    for (const { id } of await this.store.heads()) this.gone.add(id);
    await this.store.clear();
    this.begin();
    await this.show();
  }

  async read(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    let found;
    try {
      found = fromFile(await file.text());
    } catch (error) {
      return tell(`${file.name} was not imported: ${error.message}.`);
    }
    try {
      for (const each of found) await this.store.put(each);
      tell(`Imported: ${found.length} ${found.length === 1 ? "conversation" : "conversations"}.`);
    } catch (error) {
      tell(`Not all were imported: ${because(error)}`);
    }
    await this.show();
  }
}
