// The page: chat on one side, the engine on the other; on a narrow screen one at a time.

import { ask, KeyNeeded, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";

const byId = (id) => document.getElementById(id);
const PERIOD = 1000; // milliseconds between two looks

const engine = new Engine();
let looking = null;

function noteError(error) {
  if (!(error instanceof KeyNeeded)) return;
  byId("key").hidden = false;
  byId("key-field").focus();
}

async function look() {
  clearTimeout(looking);
  try {
    const now = await engine.look();
    byId("status").textContent = `${now.model} · ${now.status}`;
    byId("key").hidden = true;
  } catch (error) {
    byId("status").textContent = error instanceof TypeError ? "the server does not answer" : error.message;
    if (byId("key").hidden) noteError(error);
  }
  // A page that nobody sees asks for nothing.
  looking = document.hidden ? null : setTimeout(look, PERIOD);
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
  useKey(byId("key-field").value);
  look();
});
byId("plan-link").addEventListener("click", async (event) => {
  event.preventDefault(); // with the key, which a plain link would not send
  const plan = await (await ask("/plan")).json();
  const url = URL.createObjectURL(new Blob([JSON.stringify(plan, null, 2)], { type: "application/json" }));
  window.open(url, "_blank");
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});

new Chat(noteError);
look();
