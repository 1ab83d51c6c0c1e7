// Requests to the server, with the key that the user gave, and errors as it words them.

const KEY = "ostinato-key";

export class KeyNeeded extends Error {}

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
  if (/[^ -~]/.test(key)) throw new KeyNeeded("the server asks for a key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(`.${path}`, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  if (response.status === 401) throw new KeyNeeded("the server asks for a key");
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
  }
  return response;
}

/** The objects of a stream of server-sent events, as they come. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
