// npm's `ollama`: the short list of ollama_sdk.py.

import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { check, model, scriptedModel, scriptedUrl, url } from "./tally.mjs";

const client = new Ollama({ host: url });
const scripted = new Ollama({ host: scriptedUrl });
const messages = [{ role: "user", content: "Why is the sky blue?" }];
const options = { temperature: 0, num_predict: 24 };
const CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>';
const SCHEMA = { type: "object", properties: { is_warm: { type: "boolean" } }, required: ["is_warm"] };
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "Tells the weather.",
    parameters: { type: "object", required: ["city"], properties: { city: { type: "string" } } },
  },
};

async function all(stream) {
  const parts = [];
  for await (const part of await stream) parts.push(part);
  return parts;
}

let text = "";

await check("chat", async () => {
  const whole = await client.chat({ model, messages, options });
  text = whole.message.content;
  assert.ok(text);
  assert.deepEqual([whole.done, whole.done_reason, whole.eval_count], [true, "length", 24]);
});
await check("chat, stream", async () => {
  const parts = await all(client.chat({ model, messages, options, stream: true }));
  assert.equal(parts.map((part) => part.message.content).join(""), text);
  assert.deepEqual([parts.at(-1).done, parts.at(-1).done_reason], [true, "length"]);
});
await check("generate, whole and streamed", async () => {
  const asked = { model: `${model}:latest`, prompt: messages[0].content, options };
  assert.equal((await client.generate(asked)).response, text);
  const parts = await all(client.generate({ ...asked, stream: true }));
  assert.equal(parts.map((part) => part.response).join(""), text);
});
await check("format: a schema", async () => {
  const format = { ...SCHEMA, additionalProperties: false };
  const said = await client.chat({ model, messages, format, options: { temperature: 0, num_predict: 100 } });
  assert.equal(typeof JSON.parse(said.message.content).is_warm, "boolean");
});
for (const stream of [false, true]) {
  await check(`a loop with a tool${stream ? ", stream" : ""}`, async () => {
    const turns = [{ role: "user", content: CALL }];
    const ask = async () => {
      const asked = scripted.chat({ model: scriptedModel, messages: turns, tools: [weather], stream });
      const parts = stream ? await all(asked) : [await asked];
      const content = parts.map((part) => part.message.content).join("");
      return { role: "assistant", content, tool_calls: parts.flatMap((part) => part.message.tool_calls ?? []) };
    };
    const called = await ask();
    assert.deepEqual(called.tool_calls[0].function.arguments, { city: "Oslo" });
    turns.push(called, { role: "tool", tool_name: "weather", content: "21 degrees in Oslo" });
    assert.equal((await ask()).content, "The tool said: 21 degrees in Oslo");
  });
}
await check("list, ps, show, version", async () => {
  const [listed] = (await client.list()).models;
  const [running] = (await client.ps()).models;
  assert.deepEqual([listed.model, running.name], [`${model}:latest`, `${model}:latest`]);
  assert.equal((await client.show({ model: listed.model })).model_info["baton.context_length"], 1024);
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
});
await check("errors by status", async () => {
  const is = (status, word) => (error) => error.status_code === status && error.message.includes(word);
  await assert.rejects(client.chat({ model: "other", messages }), is(404, "other"));
  await assert.rejects(client.chat({ model: "other", messages, stream: true }), is(404, "other"));
  await assert.rejects(client.embed({ model, input: "x" }), is(400, "embeddings"));
});
await check("a stream that is broken off", async () => {
  const stream = await client.chat({ model, messages, stream: true });
  await assert.rejects(async () => {
    for await (const part of stream) if (part) client.abort();
  }, /abort/i);
  assert.equal((await client.chat({ model, messages, options })).message.content, text);
});
