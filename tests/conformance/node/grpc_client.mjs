// A gRPC client in Node that knows only the proto: generates, tokenizes, and gets an error.
// node grpc_client.mjs PROTO_DIR HOST:PORT QUESTION; prints one JSON object.
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";

const [protoDir, address, question] = process.argv.slice(2);
const definition = loader.loadSync("expertmesh/v1/generation_service.proto", {
  includeDirs: [protoDir],
  keepCase: true,
  enums: String,
  longs: Number,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).expertmesh.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());
const deadline = () => new Date(Date.now() + 60_000);

function generate(request) {
  return new Promise((resolve, reject) => {
    const pieces = [];
    const call = client.Generate(request, { deadline: deadline() });
    call.on("data", (piece) => pieces.push(piece));
    call.on("error", reject);
    call.on("end", () => resolve(pieces));
  });
}

function unary(name, request) {
  return new Promise((resolve, reject) => {
    client[name](request, { deadline: deadline() }, (error, answer) =>
      error ? reject(error) : resolve(answer),
    );
  });
}

const pieces = await generate({
  conversation: { messages: [{ role: "user", content: question }] },
  sampling: { temperature: 0 },
  stopping: { max_tokens: 16 },
});
const last = pieces.at(-1);
const model = await unary("GetModelInfo", {});
const tokens = await unary("Tokenize", { text: question });
const refused = await generate({ prompt: "x", sampling: { temperature: -1 } }).catch((e) => e);
console.log(
  JSON.stringify({
    text: pieces.map((piece) => piece.text).join(""),
    num_pieces: pieces.length,
    finish_reason: last.finish_reason,
    completion_tokens: last.usage.completion_tokens,
    model: model.model,
    num_tokens: tokens.token_ids.length,
    error: grpc.status[refused.code],
  }),
);
client.close();
