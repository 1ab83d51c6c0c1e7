// Conversations as files. What is read may come from anybody: each field is checked, and what is not known is left out.

import { make, newId } from "../dom.js";
import { isPicture } from "../chat/images.js";

const FORMAT = "ostinato-conversations";
const VERSION = 1;

export function asFile(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

export function download(text, name) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

class Malformed extends Error {}

function check(holds, where, what) {
  if (!holds) throw new Malformed(`${where} ${what}`);
}

const text = (value, where) => {
  check(typeof value === "string", where, "should be a text");
  return value;
};
const optional = (value, where) => (value === undefined || value === null ? "" : text(value, where));
const list = (value, where) => {
  check(Array.isArray(value), where, "should be a list");
  return value;
};

function message(value, where) {
  check(value && typeof value === "object", where, "should be an object");
  const { role } = value;
  check(["user", "assistant", "tool"].includes(role), `${where}.role`, "should be user, assistant or tool");
  const read = { role, text: text(value.text, `${where}.text`) };
  if (role === "user") {
    read.images = list(value.images ?? [], `${where}.images`);
    read.images.forEach((each, index) => check(isPicture(each), `${where}.images[${index}]`, "should be a picture as a data URL"));
  } else if (role === "tool") {
    read.id = text(value.id, `${where}.id`);
    read.name = text(value.name, `${where}.name`);
  } else {
    read.reasoning = optional(value.reasoning, `${where}.reasoning`);
    for (const name of ["facts", "details"]) read[name] = optional(value[name], `${where}.${name}`);
    read.cut = value.cut === true;
    read.calls = list(value.calls ?? [], `${where}.calls`).map((call, index) => ({
      id: text(call?.id, `${where}.calls[${index}].id`),
      name: text(call?.name, `${where}.calls[${index}].name`),
      arguments: text(call?.arguments, `${where}.calls[${index}].arguments`),
    }));
  }
  return read;
}

/** The conversations of a file, under new ids. Throws an Error that names the place where it is none. */
export function fromFile(content) {
  let data;
  try {
    data = JSON.parse(content);
  } catch (error) {
    throw new Malformed(`it is not JSON: ${error.message}`);
  }
  check(data?.format === FORMAT && data.version === VERSION, "it", `should be a file of ${FORMAT}, version ${VERSION}`);
  return list(data.conversations, "conversations").map((value, index) => {
    const where = `conversations[${index}]`;
    const changed = Number.isFinite(value?.changed) ? value.changed : Date.now();
    return {
      id: newId(),
      title: text(value?.title, `${where}.title`).slice(0, 200),
      created: Number.isFinite(value.created) ? value.created : changed,
      changed,
      model: optional(value.model, `${where}.model`),
      messages: list(value.messages, `${where}.messages`).map((each, number) => message(each, `${where}.messages[${number}]`)),
    };
  });
}
