// The page: conversations on one side, the chat, and the engine on the other; on a narrow screen one at a time.

import { KeyNeeded, ask, hasKey, useKey } from "./api.js";
import { Chat } from "./chat/chat.js";
import { byId } from "./dom.js";
import { History } from "./history/history.js";
import { Engine } from "./panel/engine.js";

const PERIOD = 1000; // milliseconds between two looks at an idle engine
const BUSY_PERIOD = 250; // and at one that computes
const ENDING = "the server is about to end: it finishes what runs and takes no more questions";
const LAYOUT = "ostinato-layout";
const NARROW = matchMedia("(max-width: 760px)");
const MIDDLE = matchMedia("(max-width: 1100px)");

const engine = new Engine();
let looking = null;
let isAnswering = false;
let known = null;

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

/** Asks once, and again when another server answers, what the model is. */
async function learn({ model, time, stats }) {
  const isSame = known && known.model === model && known.time <= time && known.steps <= stats.steps;
  known = { model, time, steps: stats.steps };
  if (isSame) return;
  known = null; // until it is known
  chat.know(await (await ask("/about")).json());
  known = { model, time, steps: stats.steps };
}

async function look() {
  clearTimeout(looking);
  looking = null;
  try {
    const now = await engine.look();
    say(now.status, now.status === "draining" ? ENDING : `${now.model} · ${now.status}`);
    byId("key").hidden = true;
    await learn(now);
  } catch (error) {
    say("unknown", error.message);
    if (error instanceof KeyNeeded) return askForKey(); // and look again when there is one
  }
  // A page that nobody sees asks for nothing.
  if (!document.hidden && looking === null) looking = setTimeout(look, isAnswering || engine.isBusy ? BUSY_PERIOD : PERIOD);
}

/** Which of the sides are shown; on a narrow screen at most one of them, in place of the chat. */
const layout = {};

function restoreLayout() {
  Object.assign(layout, { history: true, engine: false });
  try {
    Object.assign(layout, JSON.parse(localStorage.getItem(LAYOUT)));
  } catch {
    // as it is at first
  }
  if (MIDDLE.matches) layout.history = false;
  if (NARROW.matches) layout.engine = false;
}

function arrange() {
  for (const side of ["history", "engine"]) {
    byId(side).hidden = !layout[side];
    byId(`show-${side}`).setAttribute("aria-expanded", layout[side]);
    document.body.classList.toggle(`with-${side}`, layout[side]);
  }
  byId("chat").inert = NARROW.matches && (layout.history || layout.engine);
}

function toggle(side) {
  layout[side] = !layout[side];
  // There is no room for both beside the chat.
  if (MIDDLE.matches && layout[side]) layout[side === "history" ? "engine" : "history"] = false;
  arrange();
  if (NARROW.matches) return; // there, every visit begins with the chat
  try {
    localStorage.setItem(LAYOUT, JSON.stringify(layout));
  } catch {
    // It holds until the page is closed.
  }
}

/** On a narrow screen, back to the chat. */
function backToChat() {
  if (!MIDDLE.matches) return;
  layout.history = false;
  if (NARROW.matches) layout.engine = false;
  arrange();
}

byId("show-history").addEventListener("click", () => toggle("history"));
byId("show-engine").addEventListener("click", () => toggle("engine"));
for (const query of [NARROW, MIDDLE]) query.addEventListener("change", () => (restoreLayout(), arrange()));
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-field").value.trim());
  look().then(() => byId("key").hidden && byId("question").focus());
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});

restoreLayout();
arrange();
const kept = new History({
  onOpen: (conversation) => (backToChat(), chat.open(conversation)),
  onNew: () => (backToChat(), chat.begin()),
  onRename: (id, title) => chat.conversation.id === id && (chat.conversation.title = title),
});
const chat = new Chat({
  onChange: (conversation) => kept.keep(conversation, () => chat.conversation === conversation),
  onError: askForKey,
  onBusy: (isBusy) => {
    isAnswering = isBusy;
    if (isBusy) look();
  },
});
kept.start();
look();
