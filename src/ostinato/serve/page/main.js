// The page: chat on one side, the engine on the other; on a narrow screen one at a time.

import { hasKey, KeyNeeded, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";

const byId = (id) => document.getElementById(id);
const PERIOD = 1000; // milliseconds between two looks
const ENDING = "the server is about to end: it finishes what runs and takes no more questions";

const engine = new Engine();
let looking = null;

/** Says how the server is. The text changes only when there is news, since it is read aloud. */
function say(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  if (status.textContent !== text) status.textContent = text;
  byId("unknown").hidden = state !== "unknown";
  byId("engine").classList.toggle("stale", state === "unknown");
}

function askForKey() {
  byId("key-note").textContent = hasKey() ? "The server does not know this key." : "";
  if (!byId("key").hidden) return;
  byId("key").hidden = false;
  byId("key-field").focus();
}

async function look() {
  clearTimeout(looking);
  looking = null;
  try {
    const { model, status } = await engine.look();
    say(status, status === "draining" ? ENDING : `${model} · ${status}`);
    byId("key").hidden = true;
  } catch (error) {
    say("unknown", error.message);
    if (error instanceof KeyNeeded) return askForKey(); // and look again when there is one
  }
  // A page that nobody sees asks for nothing.
  if (!document.hidden && looking === null) looking = setTimeout(look, PERIOD);
}

function show(view) {
  document.body.classList.toggle("engine", view === "engine");
  byId("show-chat").setAttribute("aria-pressed", view === "chat");
  byId("show-engine").setAttribute("aria-pressed", view === "engine");
}

byId("show-chat").addEventListener("click", () => show("chat"));
byId("show-engine").addEventListener("click", () => show("engine"));
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-field").value.trim());
  look().then(() => byId("key").hidden && byId("question").focus());
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});

new Chat((error) => {
  if (error instanceof KeyNeeded) askForKey();
});
look();
