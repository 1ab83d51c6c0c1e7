// One answer as it comes: its text, reasoning and tool calls, and how fast it came.

import { Refused, events, post } from "../api.js";

const SHORTEST = 200; // milliseconds of tokens after the first that tell a speed

/** Reads an answer into `message`; calls `onChange` at each piece. Throws what ended it early. */
export async function readAnswer(body, signal, message, onChange) {
  const begin = performance.now();
  let first = null;
  let finish = null;
  let usage = null;
  const response = await post("/v1/chat/completions", body, signal);
  for await (const event of events(response)) {
    if (event.error) throw new Refused(event.error, 500, null);
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    finish = choice.finish_reason ?? finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (!content && !reasoning && !calls) continue;
    first ??= performance.now();
    message.reasoning += reasoning ?? "";
    message.text += content ?? "";
    for (const call of calls ?? []) addCall(message.calls, call);
    onChange();
  }
  message.cut = finish === "length" && !message.calls.length;
  Object.assign(message, facts(begin, first, performance.now(), finish, usage));
}

function addCall(calls, { index, id, function: called }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  const call = calls[index];
  call.id ||= id ?? "";
  call.name ||= called?.name ?? "";
  call.arguments += called?.arguments ?? "";
}

/** `facts`: what is shown below an answer; `details`: the rest, which is shown when asked for. */
function facts(begin, first, end, finish, usage) {
  const shown = [];
  const more = [];
  if (usage) {
    const { prompt_tokens: prompt, completion_tokens: answered, prompt_tokens_details: parts } = usage;
    shown.push(`${answered.toLocaleString("en")} token${answered === 1 ? "" : "s"}`);
    // The first token comes when the prompt has been read. What comes at once after it has no speed of its own.
    const isLong = first !== null && end - first >= SHORTEST && answered > 1;
    const seconds = (end - (isLong ? first : begin)) / 1000;
    if (first !== null) shown.push(`${count((answered - (isLong ? 1 : 0)) / seconds)} tok/s`);
    more.push(`prompt: ${prompt.toLocaleString("en")} tokens, ${(parts?.cached_tokens ?? 0).toLocaleString("en")} of them cached`);
    if (first !== null) more.push(isLong ? "speed counted after the first token" : "speed counted from the question on");
  }
  if (first !== null) more.push(`first token after ${Math.round(first - begin)} ms`);
  more.push(`whole answer after ${((end - begin) / 1000).toFixed(1)} s`);
  if (finish === "length") shown.push("cut at max tokens");
  else if (finish && finish !== "stop") shown.push(finish.replaceAll("_", " "));
  return { facts: shown.join(" · "), details: more.join(" · ") };
}

const count = (rate) => (rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en"));

/** What the API is told of a message. */
export function forRequest({ role, text, images, calls, id }) {
  if (role === "tool") return { role, tool_call_id: id, content: text };
  if (role === "user") {
    if (!images?.length) return { role, content: text };
    const pictures = images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: [...pictures, ...(text ? [{ type: "text", text }] : [])] };
  }
  if (!calls?.length) return { role, content: text };
  const told = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return { role, content: text || null, tool_calls: told };
}
