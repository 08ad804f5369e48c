// The OpenAI SDK for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  chatText, conversation, expectVectors, expectWeather, firstWith, hello, model, run, tool, url,
} from "./cells.mjs";

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const named = { type: "function", function: { name: "get_weather" } };
const Weather = z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) });

await run("openai (Node)", {
  async chat() {
    const response = await client.chat.completions.create({ model, messages: hello });
    assert.equal(response.choices[0].message.content, await chatText(hello));
  },
  async streaming() {
    let text = "";
    const stream = await client.chat.completions.create({ model, messages: hello, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, await chatText(hello));
  },
  async tools() {
    const response = await client.chat.completions.create({
      model, messages: hello, tools: [tool], tool_choice: named,
    });
    const [call] = response.choices[0].message.tool_calls;
    expectWeather(call.function.name, call.function.arguments);
  },
  async tools_streamed() {
    const stream = client.chat.completions.stream({
      model, messages: hello, tools: [tool], tool_choice: named,
    });
    const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
    expectWeather(call.function.name, call.function.arguments);
  },
  async parallel_tools() {
    const ask = async (content) => {
      const response = await client.chat.completions.create({
        model, messages: [{ role: "user", content }], tools: [tool], tool_choice: "required",
      });
      return response.choices[0].message.tool_calls;
    };
    for (const call of await firstWith(ask, (calls) => calls.length > 1)) {
      expectWeather(call.function.name, call.function.arguments);
    }
  },
  async tool_results() {
    const response = await client.chat.completions.create({ model, messages: conversation });
    assert.equal(response.choices[0].message.content, await chatText(conversation));
  },
  async agent() {
    const ask = async (content) => {
      const results = [];
      const runner = client.chat.completions.runTools(
        {
          model,
          messages: [{ role: "user", content }],
          tools: [
            {
              type: "function",
              function: {
                ...tool.function,
                parse: JSON.parse,
                function: (input) => {
                  expectWeather("get_weather", input);
                  results.push(input);
                  return "Sunny.";
                },
              },
            },
          ],
        },
        { maxChatCompletions: 60 },
      );
      return { results, text: await runner.finalContent() };
    };
    const found = await firstWith(ask, ({ results }) => results.length > 0);
    assert.ok(found.text);
  },
  async json_schema() {
    const response = await client.chat.completions.parse({
      model, messages: hello, response_format: zodResponseFormat(Weather, "weather"),
    });
    Weather.parse(response.choices[0].message.parsed);
  },
  async embeddings() {
    const { data } = await client.embeddings.create({ model, input: ["one", "two"] });
    await expectVectors(data.map((one) => one.embedding), ["one", "two"]);
  },
  async responses() {
    const whole = await client.responses.create({ model, input: "Hello" });
    assert.equal(whole.output_text, await chatText(hello));
    const stream = client.responses.stream({ model, input: "Hello" });
    assert.equal((await stream.finalResponse()).output_text, whole.output_text);
  },
});
