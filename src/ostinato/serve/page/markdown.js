// Markdown as DOM nodes. Text becomes text nodes only, so nothing that a model writes can be markup of the page.

// Lengths are bounded, so that no text takes a time that grows with its square.
const INLINE = new RegExp(
  [
    /(?<!`)(`{1,3})(?!`)([^]{0,2000}?[^`])\1(?!`)/, // code
    /\*\*(?=\S)([^]{1,2000}?)\*\*/, // strong
    /\*([^\s*](?:[^*\n]{0,1000}[^\s*])?)\*/, // emphasis
    /\[([^\]\n]{1,500})\]\((https?:\/\/[^\s)]{1,2000})\)/, // a link; no other scheme is one
  ].map((each) => each.source).join("|"),
  "g",
);
const DEEPEST = 16; // what is nested deeper is text

function make(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [, , code, strong, em, label, url] = match;
    if (code !== undefined) nodes.push(make("code", code.trim() || code));
    else if (strong !== undefined) nodes.push(make("strong", ...inline(strong)));
    else if (em !== undefined) nodes.push(make("em", ...inline(em)));
    else {
      const link = make("a", label);
      link.href = url;
      link.rel = "noreferrer noopener";
      link.target = "_blank";
      nodes.push(link);
    }
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;
const FENCE = /^\s*(```+|~~~+)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table(lines) {
  const row = (line, kind) => make("tr", ...cells(line).map((cell) => make(kind, ...inline(cell))));
  return make("table", make("thead", row(lines[0], "th")), make("tbody", ...lines.slice(2).map((line) => row(line, "td"))));
}

function list(lines, depth) {
  const indent = ITEM.exec(lines[0])[1].length;
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent + 1) items.push([match[3]]);
    else items.at(-1).push(line);
  }
  const node = make(/\d/.test(ITEM.exec(lines[0])[2]) ? "ol" : "ul");
  if (node.tagName === "OL") node.start = parseInt(ITEM.exec(lines[0])[2], 10);
  for (const [first, ...rest] of items) {
    const isNested = rest.some((line) => ITEM.test(line));
    node.append(make("li", ...inline(first), ...(isNested ? blocks(rest, depth + 1) : inline(rest.map((line) => "\n" + line.trim()).join("")))));
  }
  return node;
}

function blocks(lines, depth) {
  if (depth > DEEPEST) return [make("p", lines.join("\n"))];
  const nodes = [];
  const take = (belongs) => {
    const taken = [];
    while (lines.length && belongs(lines[0], taken.length)) taken.push(lines.shift());
    return taken;
  };
  lines = [...lines];
  while (lines.length) {
    const line = lines[0];
    if (!line.trim()) lines.shift();
    else if (FENCE.test(line)) {
      const fence = FENCE.exec(lines.shift())[1];
      const code = take((each) => !each.trim().startsWith(fence));
      lines.shift();
      nodes.push(make("pre", make("code", code.join("\n"))));
    } else if (HEADING.test(line)) {
      const [, marks, text] = HEADING.exec(lines.shift());
      nodes.push(make(`h${Math.min(marks.length + 1, 6)}`, ...inline(text)));
    } else if (RULE.test(line)) {
      lines.shift();
      nodes.push(make("hr"));
    } else if (line.startsWith(">")) {
      nodes.push(make("blockquote", ...blocks(take((each) => each.startsWith(">")).map((each) => each.replace(/^>\s?/, "")), depth + 1)));
    } else if (ITEM.test(line)) {
      nodes.push(list(take((each, taken) => !taken || ITEM.test(each) || /^\s+\S/.test(each)), depth));
    } else if (line.includes("|") && /^[\s|:-]+$/.test(lines[1] ?? "") && lines[1].includes("-")) {
      nodes.push(table(take((each) => each.includes("|"))));
    } else {
      const isText = (each, taken) => each.trim() && (!taken || !(FENCE.test(each) || HEADING.test(each) || ITEM.test(each)));
      nodes.push(make("p", ...inline(take(isText).join("\n"))));
    }
  }
  return nodes;
}

/** The nodes of a text in Markdown, finished or still growing. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}
