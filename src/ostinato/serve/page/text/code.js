// Code with its language, a button that copies it, and colours once its grammar is there.

import { button, copy, make } from "../dom.js";

const NAMES = {
  bash: "bash sh shell zsh console", c: "c h", cpp: "cpp c++ cc hpp cuda", csharp: "csharp cs c#", css: "css",
  diff: "diff patch", go: "go golang", java: "java", javascript: "javascript js jsx mjs", json: "json jsonl json5",
  kotlin: "kotlin kt", latex: "latex tex", lua: "lua", makefile: "makefile make", markdown: "markdown md", php: "php",
  python: "python py python3", ruby: "ruby rb", rust: "rust rs", sql: "sql", swift: "swift",
  typescript: "typescript ts tsx", xml: "xml html svg xhtml", yaml: "yaml yml toml",
};
const GRAMMARS = new Map(Object.entries(NAMES).flatMap(([name, all]) => all.split(" ").map((each) => [each, name])));
const LONGEST = 50_000; // characters; what is longer stays plain
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };
const LIBRARY = "../third_party/highlight/";

let library = null;
const ready = new Set();

async function load(grammar) {
  library ??= (await import(`${LIBRARY}core.js`)).default;
  if (ready.has(grammar)) return;
  library.registerLanguage(grammar, (await import(`${LIBRARY}languages/${grammar}.js`)).default);
  ready.add(grammar);
}

/**
 * The nodes of highlighted code. The library gives a text of spans with classes and escaped characters. It is read
 * here, and never parsed as markup: whatever else stood in it would be text.
 */
export function nodesOf(highlighted) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const part of highlighted.split(/(<span class="[\w\- ]*">|<\/span>)/)) {
    if (part.startsWith("<span class=")) {
      const span = make("span", { className: part.slice(13, -2) });
      open.at(-1).append(span);
      open.push(span);
    } else if (part === "</span>") {
      if (open.length > 1) open.pop();
    } else if (part) open.at(-1).append(part.replace(/&(?:amp|lt|gt|quot|#x27);/g, (entity) => ENTITIES[entity]));
  }
  return root;
}

function colour(node, text, grammar) {
  node.replaceChildren(nodesOf(library.highlight(text, { language: grammar, ignoreIllegals: true }).value));
}

/** A block of code. `language` is what stands after the fence. */
export function codeBlock(text, language) {
  const name = language.trim().split(/\s/)[0].toLowerCase();
  const code = make("code", {}, text);
  const grammar = GRAMMARS.get(name);
  if (grammar && text.length <= LONGEST) {
    if (library && ready.has(grammar)) colour(code, text, grammar);
    else load(grammar).then(() => colour(code, text, grammar), () => {}); // without colours it is as true
  }
  const label = name || "text";
  const copying = button("Copy", (event) => copy(text, event.currentTarget), { ariaLabel: `Copy this ${label}` });
  const bar = make("div", { className: "code-bar" }, make("span", {}, label), copying);
  const pre = make("pre", { tabIndex: 0, aria: { role: "region", label: `Code, ${label}` } }, code);
  return make("div", { className: "code" }, bar, pre);
}
