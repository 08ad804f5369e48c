// The AI SDK with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool as defineTool } from "ai";
import { z } from "zod";
import {
  chatText, expectVectors, expectWeather, firstWith, hello, model as name, run, url,
} from "./cells.mjs";

const provider = createOpenAICompatible({
  name: "kvmesh", baseURL: url, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const model = provider(name);
const Weather = z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) });
const settings = { model, maxRetries: 0 };
const get_weather = defineTool({
  description: "The weather.", inputSchema: Weather, execute: async () => "Sunny.",
});
const forced = { ...settings, prompt: "Hello", tools: { get_weather } };

function expectCalls(calls) {
  assert.ok(calls.length > 0);
  for (const call of calls) expectWeather(call.toolName, call.input);
}

await run("AI SDK", {
  async chat() {
    const { text } = await generateText({ ...settings, prompt: "Hello" });
    assert.equal(text, await chatText(hello));
  },
  async streaming() {
    let text = "";
    for await (const part of streamText({ ...settings, prompt: "Hello" }).textStream) text += part;
    assert.equal(text, await chatText(hello));
  },
  async tools() {
    const choice = { type: "tool", toolName: "get_weather" };
    expectCalls((await generateText({ ...forced, toolChoice: choice })).toolCalls);
  },
  async tools_streamed() {
    const stream = streamText({ ...forced, toolChoice: "required" });
    expectCalls(await stream.toolCalls);
  },
  async parallel_tools() {
    const ask = async (prompt) =>
      (await generateText({ ...forced, prompt, toolChoice: "required" })).toolCalls;
    expectCalls(await firstWith(ask, (calls) => calls.length > 1));
  },
  async agent() {
    const ask = (prompt) => generateText({ ...forced, prompt, stopWhen: stepCountIs(60) });
    const found = await firstWith(ask, (result) => result.steps.length > 1);
    assert.ok(found.text);
  },
  async json_schema() {
    const result = await generateText({
      ...settings, prompt: "Hello", output: Output.object({ schema: Weather }),
    });
    Weather.parse(result.output);
  },
  async embeddings() {
    const { embeddings } = await embedMany({
      model: provider.embeddingModel(name), values: ["one", "two"], maxRetries: 0,
    });
    await expectVectors(embeddings, ["one", "two"]);
  },
});
