// Markdown as DOM nodes. Text becomes text nodes only, so nothing that a model writes can be markup of the page.

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([\s\S]+?)\*\*|\*([^\s*](?:[^*\n]*[^\s*])?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

function make(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  let match;
  while ((match = INLINE.exec(text))) {
    nodes.push(text.slice(0, match.index));
    const [whole, , code, strong, em, label, url] = match;
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
    text = text.slice(match.index + whole.length);
  }
  nodes.push(text);
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

function list(lines) {
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
    node.append(make("li", ...inline(first), ...(isNested ? blocks(rest) : inline(rest.map((line) => "\n" + line.trim()).join("")))));
  }
  return node;
}

function blocks(lines) {
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
      nodes.push(make("blockquote", ...blocks(take((each) => each.startsWith(">")).map((each) => each.replace(/^>\s?/, "")))));
    } else if (ITEM.test(line)) {
      nodes.push(list(take((each, taken) => !taken || ITEM.test(each) || /^\s+\S/.test(each))));
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
  return blocks(text.split("\n"));
}
