// What the page shows before the first question: which model this is, and what one may ask it.

import { button, make } from "../dom.js";
import { pictureOf } from "./images.js";

const FIGURES = [[1e9, "billion"], [1e6, "million"]];

function size(count) {
  const [unit, word] = FIGURES.find(([each]) => count >= each) ?? [1, ""];
  return `${+(count / unit).toPrecision(3)}${word && ` ${word}`} parameters`;
}

function made({ architecture, parameters, layers, max_model_len: longest }) {
  const kinds = Object.entries(layers).map(([kind, number]) => `${number} ${kind.replaceAll("_", " ")}`);
  return `${architecture}, ${size(parameters)}, layers: ${kinds.join(", ")}; up to ${longest.toLocaleString("en")} tokens.`;
}

function takes(about) {
  const found = ["text", ...(about.takes_images ? ["pictures"] : []), ...(about.takes_tools ? ["tools"] : [])];
  return `It takes ${found.join(", ").replace(/, ([^,]*)$/, " and $1")}${about.reasons ? ", and reasons before it answers" : ""}.`;
}

/** A picture of the page's own, as a data URL. */
async function fetched(path) {
  const blob = await (await fetch(`page/${path}`)).blob();
  return new Promise((done) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.readAsDataURL(blob);
  });
}

function example({ text, image }, onAsk) {
  const node = button("", () => onAsk(text, node.address ? [node.address] : []), { className: "example" });
  if (image && image.startsWith("examples/")) {
    node.disabled = true;
    fetched(image).then((address) => {
      node.address = address;
      node.prepend(pictureOf(address, "The picture that is asked about"));
      node.disabled = false;
    });
  }
  node.append(make("span", {}, text));
  return node;
}

/** `about`: what the server says of the model, null while it has not. */
export function welcome(about, onAsk) {
  if (!about) return make("div", { className: "welcome" }, make("p", { className: "note" }, "The model is not there yet."));
  const parts = [
    make("h2", {}, about.model),
    about.introduction ? make("p", {}, about.introduction) : null,
    make("p", { className: "note" }, `${made(about)} ${takes(about)}`),
  ];
  if (!about.chats) parts.push(make("p", { className: "remedy" }, "Its checkpoint has no chat template, so it cannot chat: start the server with --chat-template, or use /v1/completions."));
  else parts.push(make("div", { className: "examples", role: "group", ariaLabel: "Questions to try" }, ...about.examples.map((each) => example(each, onAsk))));
  return make("div", { className: "welcome" }, ...parts);
}
