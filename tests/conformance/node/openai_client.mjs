// OpenAI's client for Node: whole, streamed, and an error.
// node openai_client.mjs BASE_URL MODEL QUESTION; prints one JSON object.
import OpenAI from "openai";

const [baseURL, model, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const request = {
  model,
  messages: [{ role: "user", content: question }],
  temperature: 0,
  max_completion_tokens: 16,
};

const whole = await client.chat.completions.create(request);
const stream = await client.chat.completions.create({
  ...request,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const refused = await client.chat.completions
  .create({ ...request, model: "nothing" })
  .catch((error) => error);
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    finish_reason: whole.choices[0].finish_reason,
    streamed,
    completion_tokens: usage.completion_tokens,
    error: refused.constructor.name,
    code: refused.code,
  }),
);
