// One answer as it comes: its text, reasoning and tool calls, and how fast it came.

import { Refused, events, post } from "../api.js";

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
  message.facts = facts(begin, first, performance.now(), finish, usage);
}

function addCall(calls, { index, id, function: called }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  const call = calls[index];
  call.id ||= id ?? "";
  call.name ||= called?.name ?? "";
  call.arguments += called?.arguments ?? "";
}

function facts(begin, first, end, finish, usage) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.prompt_tokens} tokens asked, ${cached} of them cached`, `${usage.completion_tokens} answered`);
    if (first !== null && end > first && usage.completion_tokens > 1) {
      const rate = Math.round(((usage.completion_tokens - 1) * 1000) / (end - first));
      parts.push(`${rate.toLocaleString("en")} tokens/s after the first`);
    }
  }
  if (first !== null) parts.push(`the first after ${Math.round(first - begin)} ms`);
  if (finish === "length") parts.push("cut at the most tokens");
  else if (finish && finish !== "stop") parts.push(finish.replaceAll("_", " "));
  return parts.join(" · ");
}

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
