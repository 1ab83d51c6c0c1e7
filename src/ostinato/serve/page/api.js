// Requests to the server, with the key that the user gave, and errors as it words them.

const KEY = "ostinato-key";

export class KeyNeeded extends Error {
  constructor() {
    super("the server asks for a key");
  }
}

/** The server does not answer, or its answer broke off. */
export class Unreachable extends Error {}

/** The server said no: its message, status, code, the field that is wrong, and for how many seconds to wait, if it says. */
export class Refused extends Error {
  constructor(error, status, retryAfter) {
    super(error?.message ?? `the server answered with status ${status}`);
    Object.assign(this, { status, code: error?.code ?? null, param: error?.param ?? null, retryAfter });
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  // What a header cannot carry is no key of the server.
  if (/[^ -~]/.test(key)) throw new KeyNeeded();
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(`.${path}`, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Unreachable("the server does not answer");
  });
  if (response.status === 401) throw new KeyNeeded();
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(body?.error, response.status, Number(response.headers.get("Retry-After")) || null);
  }
  return response;
}

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** The objects of a stream of server-sent events, as they come. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Unreachable("the answer broke off");
    });
    if (done) throw new Unreachable("the answer broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
