// Conversations in the browser's own database: heads for the list, and bodies, which are read when one is opened.

const NAME = "ostinato";
const VERSION = 1;

const done = (request) =>
  new Promise((good, bad) => {
    request.onsuccess = () => good(request.result);
    request.onerror = () => bad(request.error);
  });

const finished = (transaction) =>
  new Promise((good, bad) => {
    transaction.oncomplete = () => good();
    transaction.onerror = transaction.onabort = () => bad(transaction.error ?? new Error("the browser did not keep it"));
  });

function connect() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("heads", { keyPath: "id" });
    request.result.createObjectStore("bodies", { keyPath: "id" });
  };
  return done(request);
}

export class Store {
  constructor() {
    this.opening = null;
  }

  async transaction(mode, work) {
    this.opening ??= connect();
    const opened = await this.opening;
    const transaction = opened.transaction(["heads", "bodies"], mode);
    const over = finished(transaction);
    const result = await Promise.race([work(transaction.objectStore("heads"), transaction.objectStore("bodies")), over]);
    await over;
    return result;
  }

  /** What the list shows of each conversation, the last changed first. */
  async heads() {
    const found = await this.transaction("readonly", (heads) => done(heads.getAll()));
    return found.sort((one, other) => other.changed - one.changed);
  }

  /** A whole conversation, null if it is not there. */
  async get(id) {
    const [head, body] = await this.transaction("readonly", (heads, bodies) => Promise.all([done(heads.get(id)), done(bodies.get(id))]));
    return head && body ? { ...head, messages: body.messages } : null;
  }

  async all() {
    const heads = await this.heads();
    return (await Promise.all(heads.map(({ id }) => this.get(id)))).filter(Boolean);
  }

  async put({ messages, ...head }) {
    await this.transaction("readwrite", (heads, bodies) => Promise.all([done(heads.put(head)), done(bodies.put({ id: head.id, messages }))]));
  }

  async remove(id) {
    await this.transaction("readwrite", (heads, bodies) => Promise.all([done(heads.delete(id)), done(bodies.delete(id))]));
  }

  async clear() {
    await this.transaction("readwrite", (heads, bodies) => Promise.all([done(heads.clear()), done(bodies.clear())]));
  }
}
