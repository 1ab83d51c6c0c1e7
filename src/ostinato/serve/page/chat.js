// The conversation: what was said, and the answer as it comes.

import { ask, events } from "./api.js";
import { markdown } from "./markdown.js";

const byId = (id) => document.getElementById(id);

export class Chat {
  constructor(onKeyNeeded) {
    this.onError = onKeyNeeded;
    this.messages = [];
    this.abort = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("reset").addEventListener("click", () => this.reset());
    this.reset();
  }

  stop() {
    this.abort?.abort();
  }

  reset() {
    this.stop();
    this.messages = [];
    const empty = line("empty", "Ask something, and watch what the engine does with it.");
    byId("messages").replaceChildren(empty);
    byId("question").focus();
  }

  async send() {
    const text = byId("question").value.trim();
    if (!text || this.abort) return;
    if (!this.messages.length) byId("messages").replaceChildren();
    byId("question").value = "";
    this.messages.push({ role: "user", content: text });
    show("user", text);
    const messages = this.messages;
    const answer = new Answer(show("assistant", ""));
    this.busy(new AbortController());
    byId("question").focus();
    let news = null;
    try {
      const content = await answer.read(this.body(), this.abort.signal);
      messages.push({ role: "assistant", content });
    } catch (error) {
      if (error.name === "AbortError") {
        messages.push({ role: "assistant", content: answer.content });
        answer.note("stopped");
        news = "stopped";
      } else {
        messages.pop(); // it was not answered, and may be sent again
        answer.fail(error.message);
        news = error.message;
        if (!byId("question").value) byId("question").value = text;
        this.onError(error);
      }
    } finally {
      answer.draw();
      announce(news ?? answer.text.textContent);
      answer.node.classList.remove("coming");
      this.busy(null);
    }
  }

  busy(abort) {
    this.abort = abort;
    byId("stop").hidden = !abort;
    byId("send").hidden = Boolean(abort);
  }

  body() {
    const system = byId("system").value.trim();
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    const body = { messages, stream: true, stream_options: { include_usage: true } };
    if (byId("max-tokens").value) body.max_completion_tokens = Number(byId("max-tokens").value);
    if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
    return body;
  }
}

/** One answer on the page. */
class Answer {
  constructor(node) {
    this.node = node;
    node.classList.add("coming");
    this.text = document.createElement("div");
    this.text.className = "text";
    node.append(this.text);
    this.content = "";
    this.drawing = false;
  }

  async read(body, signal) {
    const begin = performance.now();
    let first = null;
    let finish = null;
    let usage = null;
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const { content, reasoning_content: reasoning } = choice.delta;
      if ((content || reasoning) && first === null) first = performance.now();
      if (reasoning) this.think(reasoning);
      if (content) this.add(content);
    }
    this.note(facts(begin, first, performance.now(), finish, usage));
    return this.content;
  }

  add(content) {
    if (this.reasoning && !this.content) this.reasoning.parentNode.open = false;
    this.content += content;
    if (this.drawing) return;
    this.drawing = true; // at most once a frame, however fast the tokens come
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw();
    });
  }

  draw() {
    const log = byId("messages");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    // What is there already stays, and with it what the reader has selected in it.
    const [old, now] = [[...this.text.childNodes], markdown(this.content)];
    const changed = now.findIndex((node, index) => !old[index]?.isEqualNode(node));
    if (changed >= 0) {
      old.slice(changed).forEach((node) => node.remove());
      this.text.append(...now.slice(changed));
    }
    if (follows) log.scrollTop = log.scrollHeight;
  }

  think(text) {
    if (!this.reasoning) {
      const details = document.createElement("details");
      details.className = "reasoning";
      details.open = true;
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      this.reasoning = document.createElement("div");
      details.append(summary, this.reasoning);
      this.node.prepend(details);
    }
    this.reasoning.append(text);
  }

  note(text) {
    this.node.append(line("facts", text));
  }

  fail(message) {
    this.node.classList.add("error");
    this.note(message);
  }
}

function facts(begin, first, end, finish, usage) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.prompt_tokens} tokens asked, ${cached} of them cached`, `${usage.completion_tokens} answered`);
    if (first !== null && end > first && usage.completion_tokens > 1) {
      parts.push(`${Math.round(((usage.completion_tokens - 1) * 1000) / (end - first))} tokens/s`);
    }
  }
  if (first !== null) parts.push(`the first after ${Math.round(first - begin)} ms`);
  if (finish && finish !== "stop") parts.push(finish === "length" ? "cut at the most tokens" : finish);
  return parts.join(" · ");
}

function line(className, text) {
  const node = document.createElement("p");
  node.className = className;
  node.textContent = text;
  return node;
}

/** Has a text read aloud: answers as a whole, not each token. */
function announce(text) {
  byId("announcement").textContent = text;
}

function show(role, text) {
  const node = document.createElement("div");
  node.className = `message ${role}`;
  node.append(text);
  byId("messages").append(node);
  byId("messages").scrollTop = byId("messages").scrollHeight;
  return node;
}
