// The openai SDK for Node: the short list of openai_sdk.py.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { check, model, scriptedModel, scriptedUrl, url } from "./tally.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const SKY = [{ role: "user", content: "Why is the sky blue?" }];
const FRANCE = { model, prompt: "The capital of France is", max_tokens: 12, temperature: 0 };
const CALL = { id: "call_1", type: "function", function: { name: "weather", arguments: '{"city": "Paris"}' } };
const AGENT = [
  { role: "developer", content: "Answer briefly." },
  { role: "user", content: [{ type: "text", text: "How warm is it in Paris?" }] },
  { role: "assistant", content: null, tool_calls: [CALL] },
  { role: "tool", tool_call_id: "call_1", content: "21 degrees" },
];
const BOUNDED = { type: "object", properties: { is_warm: { type: "boolean" } }, required: ["is_warm"] };
const REPORT = {
  type: "function",
  function: { name: "report", parameters: { ...BOUNDED, additionalProperties: false } },
};

function greedy(more = {}, options = {}) {
  return client.chat.completions.create({ model, messages: SKY, max_tokens: 24, temperature: 0, ...more }, options);
}

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

let text = "";

await check("chat", async () => {
  const whole = await greedy();
  text = whole.choices[0].message.content;
  assert.equal(whole.choices[0].finish_reason, "length");
  assert.equal(whole.usage.completion_tokens, 24);
});
await check("chat, stream", async () => {
  const chunks = await all(await greedy({ stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), text);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
});
await check("stream with usage", async () => {
  const last = (await all(await greedy({ stream: true, stream_options: { include_usage: true } }))).at(-1);
  assert.deepEqual([last.choices, last.usage.completion_tokens], [[], 24]);
});
await check("completions", async () => {
  const whole = (await client.completions.create(FRANCE)).choices[0].text;
  const chunks = await all(await client.completions.create({ ...FRANCE, stream: true }));
  assert.match(whole, /Paris/);
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole);
});
await check("logprobs", async () => {
  const tokens = (await greedy({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content;
  assert.equal(Buffer.from(tokens.flatMap((token) => token.bytes)).toString(), text);
});
await check("n", async () => {
  const choices = (await greedy({ n: 3, temperature: 1, seed: 7 })).choices;
  assert.deepEqual(choices.map((choice) => choice.index), [0, 1, 2]);
  assert.equal(new Set(choices.map((choice) => choice.message.content)).size, 3);
});
await check("stop", async () => {
  const word = text.split(" ")[3];
  const choice = (await greedy({ stop: word })).choices[0];
  assert.deepEqual([choice.finish_reason, choice.message.content], ["stop", text.slice(0, text.indexOf(word))]);
});
await check("an agent's history", async () => {
  assert.ok((await greedy({ messages: AGENT })).usage.prompt_tokens > 20);
});
await check("tools required", async () => {
  const forced = { tools: [REPORT], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
  const choice = (await greedy(forced)).choices[0];
  const call = choice.message.tool_calls[0].function;
  assert.deepEqual([choice.finish_reason, call.name], ["tool_calls", "report"]);
  assert.equal(typeof JSON.parse(call.arguments).is_warm, "boolean");
});
await check("runTools, stream", async () => {
  const scripted = new OpenAI({ baseURL: `${scriptedUrl}/v1`, apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: `say:<tool_call>{"name": "weather", "arguments": {}}</tool_call>` }];
  const weather = { name: "weather", parameters: { type: "object", properties: {} }, function: () => "21 degrees" };
  const asked = { model: scriptedModel, messages, tools: [{ type: "function", function: weather }], stream: true };
  assert.equal(await scripted.chat.completions.runTools(asked).finalContent(), "The tool said: 21 degrees");
});
await check("responses", async () => {
  const asked = { model, input: SKY, max_output_tokens: 24, temperature: 0 };
  const whole = await client.responses.create(asked);
  const final = await client.responses.stream(asked).finalResponse();
  assert.ok(whole.output_text);
  assert.deepEqual([whole.status, final.output_text], ["incomplete", whole.output_text]);
});
await check("models", async () => {
  assert.ok((await all(await client.models.list())).some((one) => one.id === model));
  assert.equal((await client.models.retrieve(model)).id, model);
});
await check("headers of withResponse", async () => {
  const answer = await greedy({ max_tokens: 2 }, { headers: { "X-Request-Id": "mine-17" } }).withResponse();
  assert.equal(answer.response.headers.get("x-request-id"), "mine-17");
  assert.equal(answer.request_id, "mine-17");
});
await check("errors by type", async () => {
  await assert.rejects(greedy({ model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(greedy({ max_tokens: -1 }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === "max_tokens";
  });
  await assert.rejects(client.responses.create({ model, input: "x", background: true }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === "background";
  });
  await assert.rejects(client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
});
await check("a stream hung up", async () => {
  for await (const _ of await greedy({ stream: true, max_tokens: 900 })) break;
  assert.equal((await greedy()).choices[0].finish_reason, "length");
});
