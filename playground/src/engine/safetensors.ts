/** The format of the models: https://huggingface.co/docs/safetensors. Nothing in it can run code. */

export interface Tensor {
  shape: number[];
  data: Float32Array;
}

export interface Safetensors {
  metadata: Record<string, string>;
  tensors: Map<string, Tensor>;
}

const BYTES = { F32: 4, F16: 2 };

/** Read a file; each tensor is copied. Throws an Error of one sentence if it is damaged. */
export function readSafetensors(file: ArrayBuffer): Safetensors {
  const damaged = (why: string) => new Error(`The model's file is damaged: ${why}.`);
  if (file.byteLength < 8) throw damaged("it has no header");
  const length = Number(new DataView(file).getBigUint64(0, true));
  if (length > file.byteLength - 8) throw damaged("its header is cut off");
  let header: unknown;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(file, 8, length)));
  } catch {
    throw damaged("its header is not JSON");
  }
  if (!isRecord(header)) throw damaged("its header is not an object");

  const { __metadata__: metadata = {}, ...entries } = header;
  if (!isRecord(metadata) || !Object.values(metadata).every((text) => typeof text === "string"))
    throw damaged("its metadata are not texts");
  const start = 8 + length;
  const tensors = new Map<string, Tensor>();
  for (const [name, entry] of Object.entries(entries)) {
    if (!isRecord(entry) || !isSizes(entry.shape) || !isSizes(entry.data_offsets) || entry.data_offsets.length !== 2)
      throw damaged(`its entry of ${name} is incomplete`);
    const { dtype, shape, data_offsets: [begin, end] } = entry;
    if (dtype !== "F32" && dtype !== "F16") throw new Error(`${name} has dtype ${dtype}; it must be F32 or F16.`);
    const size = shape.reduce((a, b) => a * b, 1);
    if (end - begin !== size * BYTES[dtype]) throw damaged(`${name} does not have the size of its shape`);
    if (end > file.byteLength - start) throw damaged(`${name} is cut off`);
    const bytes = file.slice(start + begin, start + end);
    tensors.set(name, { shape, data: dtype === "F32" ? new Float32Array(bytes) : fromHalf(new Uint16Array(bytes)) });
  }
  return { metadata: metadata as Record<string, string>, tensors };
}

/** IEEE 754 binary16: sign, 5 bits of exponent, 10 of fraction. */
function fromHalf(bits: Uint16Array): Float32Array {
  return Float32Array.from(bits, (b) => {
    const sign = b >> 15 ? -1 : 1;
    const exponent = (b >> 10) & 31;
    const fraction = (b & 1023) / 1024;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
  });
}

function isRecord(x: unknown): x is Record<string, unknown> {
  return typeof x === "object" && x !== null && !Array.isArray(x);
}

function isSizes(x: unknown): x is number[] {
  return Array.isArray(x) && x.every((n) => Number.isSafeInteger(n) && n >= 0);
}
