// npm's `ai` with three of its providers: chats, OpenAI's responses and Anthropic's messages.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, model, scriptedModel, scriptedUrl, url } from "./tally.mjs";

const SKY = "Why is the sky blue?";
const CALL = 'say:<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>';
const ANSWER = "The tool said: 21 degrees in Oslo";
// Bounded, so that any model comes to its end.
const REPORT = z.strictObject({ sky: z.enum(["clear", "cloudy", "rain"]), isWarm: z.boolean() });
const weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `21 degrees in ${city}`,
});
const report = tool({ description: "Reports the weather.", inputSchema: REPORT });
globalThis.AI_SDK_LOG_WARNINGS = false;

const PROVIDERS = {
  "openai-compatible": (base) =>
    createOpenAICompatible({ name: "b", baseURL: `${base}/v1`, includeUsage: true, supportsStructuredOutputs: true }),
  openai: (base) => createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" }),
  anthropic: (base) => createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" }),
};

for (const [name, make] of Object.entries(PROVIDERS)) {
  const asked = { model: make(url)(model), prompt: SKY, temperature: 0, maxRetries: 0 };
  const scripted = { model: make(scriptedUrl)(scriptedModel), maxRetries: 0 };
  const loop = { ...scripted, prompt: CALL, tools: { weather }, stopWhen: stepCountIs(3) };
  let text = "";

  await check(`${name}: generateText`, async () => {
    const whole = await generateText({ ...asked, maxOutputTokens: 24 });
    text = whole.text;
    assert.ok(text);
    assert.deepEqual([whole.finishReason, whole.usage.outputTokens], ["length", 24]);
  });
  await check(`${name}: streamText`, async () => {
    const stream = streamText({ ...asked, maxOutputTokens: 24 });
    const pieces = [];
    for await (const piece of stream.textStream) pieces.push(piece);
    assert.equal(pieces.join(""), text);
    assert.deepEqual([await stream.finishReason, (await stream.usage).outputTokens], ["length", 24]);
  });
  await check(`${name}: generateObject`, async () => {
    REPORT.parse((await generateObject({ ...asked, schema: REPORT, maxOutputTokens: 200 })).object);
  });
  await check(`${name}: Output.object`, async () => {
    const output = Output.object({ schema: REPORT });
    REPORT.parse((await generateText({ ...asked, output, maxOutputTokens: 200 })).output);
  });
  await check(`${name}: Output.object, stream`, async () => {
    const output = Output.object({ schema: REPORT });
    REPORT.parse(await streamText({ ...asked, output, maxOutputTokens: 200 }).output);
  });
  await check(`${name}: toolChoice required`, async () => {
    const called = await generateText({ ...asked, tools: { report }, toolChoice: "required", maxOutputTokens: 200 });
    assert.equal(called.toolCalls[0].toolName, "report");
    REPORT.parse(called.toolCalls[0].input);
  });
  await check(`${name}: a loop with a tool`, async () => {
    const done = await generateText(loop);
    assert.deepEqual([done.text, done.steps.length], [ANSWER, 2]);
  });
  await check(`${name}: a loop with a tool, stream`, async () => {
    const stream = streamText(loop);
    let said = "";
    for await (const piece of stream.textStream) said += piece;
    assert.deepEqual([said, (await stream.steps).length], [ANSWER, 2]);
  });
  await check(`${name}: an unknown model`, async () => {
    const ask = generateText({ ...asked, model: make(url)("other") });
    await assert.rejects(ask, (error) => error.statusCode === 404 && /other/.test(error.message));
  });
}
