// The conversation: what was said, what is asked now, and what is done with answers.

import { KeyNeeded } from "../api.js";
import { announce, byId, newId } from "../dom.js";
import { forRequest, readAnswer } from "./answer.js";
import { errorBox } from "./errors.js";
import { Pictures, filesOf } from "./images.js";
import { AnswerNode, keepEnd, questionNode, resultForm, resultNode } from "./message.js";
import { Settings } from "./settings.js";
import { welcome } from "./welcome.js";

const TITLE = 60; // characters

export class Chat {
  /** `onChange` gets the conversation when it should be kept, `onError` what went wrong, `onBusy` whether an answer is coming. */
  constructor({ onChange, onError, onBusy }) {
    Object.assign(this, { onChange, onError, onBusy, about: null, abort: null });
    this.settings = new Settings();
    this.pictures = new Pictures(byId("pictures"), () => this.ready());
    keepEnd(byId("messages"));
    this.listen();
    this.begin();
  }

  listen() {
    const question = byId("question");
    byId("ask").addEventListener("submit", (event) => (event.preventDefault(), this.send()));
    question.addEventListener("keydown", (event) => {
      // On a touch screen Enter makes a line, as everywhere there.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && (this.settings.close() || this.stop()));
    byId("stop").addEventListener("click", () => this.stop());
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", (event) => this.attach([...event.target.files]).then(() => (event.target.value = "")));
    question.addEventListener("paste", (event) => {
      const files = filesOf(event.clipboardData);
      if (!files.length || !this.takesImages) return;
      event.preventDefault();
      this.attach(files);
    });
    byId("chat").addEventListener("dragover", (event) => this.dragged(event, true));
    byId("chat").addEventListener("dragleave", (event) => this.dragged(event, false));
    byId("chat").addEventListener("drop", (event) => {
      this.dragged(event, false);
      if (this.takesImages) this.attach(filesOf(event.dataTransfer));
    });
  }

  get takesImages() {
    return Boolean(this.about?.takes_images);
  }

  dragged(event, isOver) {
    event.preventDefault(); // else the browser would leave the page for the file
    byId("chat").classList.toggle("dropping", isOver && this.takesImages);
  }

  async attach(files) {
    await this.pictures.add(files);
    this.focus();
  }

  /** What the server says of its model. */
  know(about) {
    const isNew = JSON.stringify(about) !== JSON.stringify(this.about);
    this.about = about;
    if (!isNew) return;
    this.settings.know(about);
    byId("attach").hidden = !about.takes_images;
    if (!this.conversation.messages.length) this.draw();
  }

  /** A new conversation. */
  begin() {
    this.open({ id: newId(), title: "", created: Date.now(), changed: Date.now(), model: "", messages: [] });
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.pictures.set([]);
    this.draw();
    this.focus();
  }

  /** Where the next question is written; on a touch screen that would bring the keyboard over the answer. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) byId("question").focus();
  }

  stop() {
    this.abort?.abort();
  }

  ready() {
    byId("send").disabled = false;
  }

  /** All that was said, anew. */
  draw() {
    const { messages } = this.conversation;
    const nodes = messages.map((message, index) => this.node(message, index));
    byId("messages").replaceChildren(...nodes);
    if (!messages.length) byId("messages").append(welcome(this.about, (text, images) => this.ask(text, images)));
    this.offerResults();
    if (messages.length && messages.at(-1).role !== "assistant") this.offerAnswer();
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }

  node(message, index) {
    if (message.role === "user") return questionNode(message, (text) => this.edit(index, text));
    if (message.role === "tool") return resultNode(message);
    const isLast = index === this.conversation.messages.length - 1;
    const answer = new AnswerNode(message, () => this.goBackTo(index), isLast ? () => this.resume() : null);
    answer.end();
    return answer.node;
  }

  add(message) {
    const { messages } = this.conversation;
    if (!messages.length) byId("messages").replaceChildren();
    messages.push(message);
    byId("messages").append(this.node(message, messages.length - 1));
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }

  async send() {
    const text = byId("question").value.trim();
    if ((!text && !this.pictures.addresses.length) || this.abort || !this.settings.isRight()) return;
    byId("question").value = "";
    await this.ask(text, this.pictures.take());
    this.focus();
  }

  async ask(text, images = []) {
    if (this.abort || !this.settings.isRight()) return;
    const { messages } = this.conversation;
    if (messages.at(-1)?.role === "user") this.cut(messages.length - 1); // it was never answered
    for (const last of [".results", ".continue"]) byId("messages").querySelector(last)?.remove();
    this.add({ role: "user", text, images });
    this.conversation.title ||= text.replace(/\s+/g, " ").slice(0, TITLE) || "a picture";
    await this.answer();
  }

  /** Only the first messages stay. */
  cut(length) {
    this.conversation.messages.length = length;
    this.draw();
  }

  async edit(index, text) {
    const { images } = this.conversation.messages[index];
    if (this.abort || !this.settings.isRight()) return;
    this.stop();
    this.cut(index);
    await this.ask(text, images);
  }

  /** Asks once more for the message at `index`. */
  async goBackTo(index) {
    if (this.abort || !this.settings.isRight()) return;
    this.cut(index);
    await this.answer();
  }

  /** Goes on with the last answer, which was cut off or stopped. */
  async resume() {
    if (this.abort || !this.settings.isRight()) return;
    const message = this.conversation.messages.pop();
    byId("messages").lastElementChild.remove();
    await this.answer(message);
  }

  /** The next answer, to all that was said; `begun`: one whose beginning is there. */
  async answer(begun = null) {
    const conversation = this.conversation;
    const message = begun ?? { role: "assistant", text: "", reasoning: "", calls: [], facts: "", details: "" };
    const goBack = () => this.goBackTo(conversation.messages.indexOf(message));
    const shown = new AnswerNode(message, goBack, () => this.resume());
    if (begun) shown.draw();
    shown.node.classList.add("coming");
    byId("messages").querySelector(".failure")?.remove();
    byId("messages").append(shown.node);
    byId("messages").scrollTop = byId("messages").scrollHeight;
    this.busy(new AbortController());
    conversation.model = this.about?.model ?? conversation.model;
    this.keep(conversation);
    try {
      await readAnswer(this.body(begun), this.abort.signal, message, () => shown.drawSoon());
    } catch (error) {
      if (error.name !== "AbortError") {
        if (begun) conversation.messages.push(begun);
        return this.failed(error, shown, begun);
      }
      Object.assign(message, { facts: "stopped", details: "" });
      message.cut = true;
      message.calls = []; // they may not be whole
    } finally {
      this.busy(null);
    }
    conversation.messages.push(message);
    shown.end();
    announce(message.facts === "stopped" ? "stopped" : message.text || "The model calls a tool.");
    this.keep(conversation);
    if (conversation === this.conversation) this.offerResults();
  }

  failed(error, shown, begun) {
    shown.draw();
    shown.node.classList.remove("coming");
    const { messages } = this.conversation;
    const retry = () => {
      if (begun) return this.resume();
      shown.node.remove();
      this.answer();
    };
    const last = messages.at(-1);
    const edit = last?.role === "user" ? () => byId("messages").querySelector(".user:nth-last-child(2) .edit").click() : null;
    shown.node.append(errorBox(error, retry, edit));
    byId("messages").scrollTop = byId("messages").scrollHeight;
    if (error instanceof KeyNeeded) this.onError(error);
  }

  /** What was said last has no answer: the page was closed, or the server failed. */
  offerAnswer() {
    byId("messages").append(errorBox(new Error("This was not answered."), () => this.answer(), null));
  }

  busy(abort) {
    this.abort = abort;
    byId("stop").hidden = !abort;
    byId("send").hidden = Boolean(abort);
    byId("messages").ariaBusy = String(Boolean(abort));
    document.body.classList.toggle("answering", Boolean(abort));
    this.onBusy(Boolean(abort));
  }

  keep(conversation) {
    conversation.changed = Date.now();
    this.onChange(conversation);
  }

  /** If the last answer calls tools, asks for what they give. */
  offerResults() {
    const last = this.conversation.messages.at(-1);
    if (last?.role !== "assistant" || !last.calls?.length) return;
    const form = resultForm(last.calls, (results) => {
      form.remove();
      last.calls.forEach(({ id, name }, index) => this.add({ role: "tool", id, name, text: results[index] }));
      this.answer();
    });
    byId("messages").append(form);
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }

  body(begun) {
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    const messages = [...system, ...[...this.conversation.messages, ...(begun ? [begun] : [])].map(forRequest)];
    const goesOn = begun ? { add_generation_prompt: false, continue_final_message: true } : {};
    return { messages, stream: true, stream_options: { include_usage: true }, ...goesOn, ...this.settings.request() };
  }
}
