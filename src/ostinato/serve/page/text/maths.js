// Formulas: where they stand in Markdown, and how they are shown. The library comes with the first of them.

import { make } from "../dom.js";

const LIBRARY = "../third_party/katex/katex.js";
const LONGEST = 5000; // characters; what is longer stays as it was written
const OPTIONS = { throwOnError: false, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 };

let loading = null;

async function load() {
  const style = make("link", { rel: "stylesheet", href: new URL("../third_party/katex/katex.css", import.meta.url).href });
  const styled = new Promise((done) => (style.onload = style.onerror = done));
  document.head.append(style);
  await Promise.all([import(LIBRARY), styled]); // it puts itself on the global object
}

function draw(node, tex, displayMode) {
  try {
    globalThis.katex.render(tex, node, { ...OPTIONS, displayMode });
  } catch {
    node.textContent = tex;
  }
}

/** A formula; as it was written until the library is there, and for good if it cannot be read. */
export function formula(tex, isDisplay) {
  const node = make(isDisplay ? "div" : "span", { className: isDisplay ? "maths display" : "maths" }, tex);
  if (isDisplay) Object.assign(node, { tabIndex: 0, role: "group", ariaLabel: "Formula" });
  if (tex.length > LONGEST) return node;
  if (globalThis.katex) draw(node, tex, isDisplay);
  else (loading ??= load()).then(() => draw(node, tex, isDisplay), () => (loading = null));
  return node;
}

/** How a line of text says that a formula begins and ends: the signs, and whether it stands apart. */
const SIGNS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

function inText(state, silent) {
  for (const [open, close, isDisplay] of SIGNS) {
    if (!state.src.startsWith(open, state.pos)) continue;
    const begin = state.pos + open.length;
    const end = endOf(state.src, begin, Math.min(state.posMax, begin + LONGEST), close);
    if (end < 0) continue;
    // A price is no formula: "$5 and $6" has a space before its second sign, or a digit after it.
    if (open === "$" && (/^\s|\s$/.test(state.src.slice(begin, end)) || /\d/.test(state.src[end + 1] ?? ""))) continue;
    if (!silent) {
      const token = state.push("maths", "", 0);
      token.content = state.src.slice(begin, end);
      token.meta = { isDisplay };
    }
    state.pos = end + close.length;
    return true;
  }
  return false;
}

function endOf(text, begin, most, close) {
  const end = text.indexOf(close, begin);
  return end <= begin || end > most ? -1 : end;
}

/** A block: a line that begins with the sign, up to the line that ends with it. */
function asBlock(state, first, last, silent) {
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]).trim();
  const sign = SIGNS.find(([open, , isDisplay]) => isDisplay && line(first).startsWith(open));
  if (!sign) return false;
  const [open, close] = sign;
  let [end, text] = [first, line(first).slice(open.length)];
  while (!text.endsWith(close)) {
    if (++end >= last || !line(end) || text.length > LONGEST) return false; // not complete, or never
    text += `\n${line(end)}`;
  }
  text = text.slice(0, -close.length).trim();
  if (!text) return false;
  if (silent) return true;
  const token = state.push("maths", "", 0);
  token.block = true;
  token.content = text;
  token.meta = { isDisplay: true };
  token.map = [first, end + 1];
  state.line = end + 1;
  return true;
}

/** Teaches markdown-it formulas: $...$, $$...$$, \(...\) and \[...\]. */
export function withMaths(markdownIt) {
  markdownIt.inline.ruler.before("escape", "maths", inText);
  markdownIt.block.ruler.before("fence", "maths", asBlock, { alt: ["paragraph", "blockquote", "list"] });
}
