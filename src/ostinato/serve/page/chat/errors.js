// What went wrong, and what the reader can do about it.

import { KeyNeeded, Unreachable } from "../api.js";
import { button, make } from "../dom.js";

const BY_STATUS = {
  408: "The request took too long to arrive. Retry.",
  413: "Take a picture away, or shorten the text, and ask again.",
  429: "Others are being served. Retry in a moment.",
  500: "The server's log says more. Retry, and if it happens again, ask whoever runs it.",
  503: "Wait until the page says that the model is ready, then retry.",
  504: "Allow fewer tokens under Settings, or retry when less is running.",
};
const BY_FIELD = {
  messages: "Edit the question, or begin a new conversation.",
  tools: "Correct the tools under Settings, then retry.",
  max_tokens: "Allow fewer tokens under Settings, then retry.",
  max_completion_tokens: "Allow fewer tokens under Settings, then retry.",
};
const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

export function advice(error) {
  if (error instanceof KeyNeeded) return "Give the key at the top of the page, then retry.";
  if (error instanceof Unreachable) return "Look whether the server runs and is reached from here, then retry.";
  if (error.retryAfter) return `Retry in ${error.retryAfter} s: others are being served.`;
  const field = error.param?.split(/[.[]/)[0];
  if (SETTINGS.includes(field)) return `Correct ${field} under Settings, then retry.`;
  return BY_FIELD[field] ?? BY_STATUS[error.status] ?? (error.status < 500 ? "Change the question or the settings, then retry." : "Retry.");
}

/** A box that says what happened and what to do, and offers to do it again. */
export function errorBox(error, onRetry, onEdit) {
  const retry = button("Retry", onRetry, { className: "primary" });
  const edit = onEdit ? button("Edit the question", onEdit) : null;
  return make(
    "div",
    { className: "failure", aria: { role: "alert" } },
    make("p", { className: "what" }, error.message),
    make("p", { className: "remedy" }, advice(error)),
    make("div", { className: "actions" }, retry, edit),
  );
}
