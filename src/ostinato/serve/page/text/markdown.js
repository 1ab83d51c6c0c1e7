// Markdown as DOM nodes. markdown-it reads it; its tokens become elements here, and all text text nodes, so nothing that
// a model writes can be markup of the page.

import { make } from "../dom.js";
import MarkdownIt from "../third_party/markdown-it/markdown-it.js";
import { codeBlock } from "./code.js";
import { formula, withMaths } from "./maths.js";

const LONGEST = 400_000; // characters; what is longer stays plain text
const DEEPEST = 60; // lists and quotes within each other
const ELEMENTS = new Set(
  "p em strong s blockquote ul ol li table thead tbody tr th td h1 h2 h3 h4 h5 h6 a hr br code".split(" "),
);

const reader = new MarkdownIt({ html: false, linkify: false, breaks: false, maxNesting: DEEPEST });
withMaths(reader);

/** The address of a link, null unless it leads to a page or a mailbox. */
export function safeAddress(address) {
  try {
    const { protocol, href } = new URL(address);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch {
    return null; // a relative address would be one of this page
  }
}

function link(token) {
  const href = safeAddress(token.attrGet("href"));
  return href ? make("a", { href, rel: "noreferrer noopener", target: "_blank" }) : make("span");
}

/** A picture is never loaded: its description, linked. */
function picture(token) {
  const href = safeAddress(token.attrGet("src"));
  const text = token.content || "picture";
  return href ? make("a", { href, rel: "noreferrer noopener", target: "_blank" }, text) : text;
}

const plain = (text) => make("p", { className: "plain" }, text);

function element(token) {
  if (token.tag === "a") return link(token);
  // The page has the first levels of headings.
  const name = token.tag.replace(/^h(\d)$/, (_, level) => `h${Math.min(Number(level) + 2, 6)}`);
  const node = make(ELEMENTS.has(name) ? name : "span");
  if (name === "ol" && token.attrGet("start") !== null) node.start = Number(token.attrGet("start"));
  const side = /text-align:(left|right|center)/.exec(token.attrGet("style") ?? "");
  if (side) node.className = `to-${side[1]}`;
  return node;
}

function leaf(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return codeBlock(token.content.replace(/\n$/, ""), token.info);
    case "maths":
      return formula(token.content, token.meta.isDisplay);
    case "code_inline":
      return make("code", {}, token.content);
    case "plain":
      return plain(token.content);
    case "image":
      return picture(token);
    case "softbreak":
      return "\n";
    case "hardbreak":
      return make("br");
    case "hr":
      return make("hr");
    default:
      return token.content;
  }
}

function fill(parent, tokens) {
  const open = [parent];
  for (const token of tokens) {
    if (token.type === "inline") fill(open.at(-1), token.children);
    else if (token.hidden) continue; // the paragraphs of a tight list
    else if (token.nesting === 1) {
      const node = element(token);
      // Wide tables scroll by themselves.
      const outer = node.localName === "table" ? make("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Table" }, node) : node;
      open.at(-1).append(outer);
      open.push(node);
    } else if (token.nesting === -1) open.pop();
    else open.at(-1).append(leaf(token));
  }
}

/** [source, tokens] of each block at the top. */
function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let depth = 0;
  for (const token of reader.parse(text, {})) {
    if (depth === 0) found.push([token.map?.[0] ?? 0, []]);
    found.at(-1)[1].push(token);
    depth += token.nesting;
  }
  return found.map(([begin, tokens], index) => {
    const source = lines.slice(begin, found[index + 1]?.[0]).join("\n").trimEnd();
    // markdown-it leaves out what is nested deeper: such a block is shown as it was written.
    const isDeep = tokens.some(({ level }) => level >= DEEPEST - 2);
    return [source, isDeep ? [{ type: "plain", content: source, nesting: 0 }] : tokens];
  });
}

/** A text in Markdown, finished or still growing, in `node`. */
export class Growing {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  /** Shows the text. Blocks that are as they were stay, and with them what the reader has selected in them. */
  show(text) {
    if (text.length > LONGEST) {
      this.sources = [];
      this.node.replaceChildren(plain(text));
      return;
    }
    const now = blocks(text);
    const same = now.findIndex(([source], index) => source !== this.sources[index]);
    const kept = same < 0 ? now.length : same;
    while (this.node.childNodes.length > kept) this.node.lastChild.remove();
    for (const [, tokens] of now.slice(kept)) {
      const holder = document.createDocumentFragment();
      fill(holder, tokens);
      this.node.append(holder.childNodes.length === 1 ? holder : make("div", {}, holder));
    }
    this.sources = now.map(([source]) => source);
  }
}

/** The nodes of a whole text. */
export function markdown(text) {
  const node = make("div");
  new Growing(node).show(text);
  return [...node.childNodes];
}
