/**
 * The product of a vector and a matrix, y += x·M, in which nearly all of the time goes.
 *
 * The columns are stored in panels of 16: of each row, 16 numbers lie side by side, and a panel's rows follow one
 * another. Both programs below read them in this order. One is WebAssembly with SIMD, made by `assemble`; the
 * other is for browsers without SIMD (before 2021; Safari before 16.4), and says what the first one does.
 */

const PANEL = 16;
const pad = (n: number) => Math.ceil(n / PANEL) * PANEL;

type At = (row: number, column: number) => number;
type Product = (x: Float32Array, panels: Float32Array, y: Float32Array) => void;

const hasSimd = () => typeof WebAssembly === "object" && WebAssembly.validate(assemble());

/** Memory for a model's arrays, where WebAssembly can reach them if there is any. */
export class Arena {
  readonly product: Product;
  private readonly buffer: ArrayBuffer;
  private used = 0;

  /** `shapes`: of all matrices that will be made. */
  constructor(shapes: Iterable<readonly [number, number]>, simd = hasSimd()) {
    let floats = 2 ** 18; // for vectors
    for (const [rows, columns] of shapes) floats += rows * pad(columns) + columns * pad(rows) + 2 * PANEL;
    const pages = Math.ceil((floats * 4) / 2 ** 16);
    const memory = simd ? new WebAssembly.Memory({ initial: pages }) : undefined;
    this.buffer = memory ? memory.buffer : new ArrayBuffer(pages * 2 ** 16);
    this.product = memory ? withSimd(memory) : plain;
  }

  /** Return zeros. A product may add zeros to up to 15 numbers behind them. */
  vector(length: number): Float32Array {
    const view = new Float32Array(this.buffer, this.used * 4, length);
    this.used += pad(length) + PANEL;
    return view;
  }

  /** Return some columns of a matrix with so many rows, by default all. */
  matrix(rows: number, M: Float32Array, first = 0, end = M.length / rows): Matrix {
    const columns = M.length / rows;
    return new Matrix(this, rows, end - first, (row, column) => M[row * columns + first + column]);
  }
}

/** A matrix M of an arena. The vectors that it is multiplied with are of the same arena. */
export class Matrix {
  private readonly panels: Float32Array;
  private transposed: Float32Array | undefined;

  constructor(
    private readonly arena: Arena,
    private readonly rows: number,
    private readonly columns: number,
    private readonly at: At,
  ) {
    this.panels = panels(arena, rows, columns, at);
  }

  /** Compute y += x·M. */
  times(x: Float32Array, y: Float32Array): void {
    this.arena.product(x, this.panels, y);
  }

  /** Compute y += x·Mᵀ. Only gradients need it. */
  timesT(x: Float32Array, y: Float32Array): void {
    this.transposed ??= panels(this.arena, this.columns, this.rows, (column, row) => this.at(row, column));
    this.arena.product(x, this.transposed, y);
  }
}

function panels(arena: Arena, rows: number, columns: number, at: At): Float32Array {
  const result = arena.vector(rows * pad(columns));
  for (let first = 0, k = 0; first < columns; first += PANEL)
    for (let row = 0; row < rows; row++)
      for (let column = first; column < first + PANEL; column++, k++)
        if (column < columns) result[k] = at(row, column);
  return result;
}

function plain(x: Float32Array, panels: Float32Array, y: Float32Array): void {
  const rows = x.length;
  for (let panel = 0; panel * PANEL < y.length; panel++)
    for (let four = 0; four < PANEL; four += 4) {
      const column = panel * PANEL + four;
      let [s0, s1, s2, s3] = [0, 0, 0, 0];
      for (let row = 0, k = panel * rows * PANEL + four; row < rows; row++, k += PANEL) {
        const v = x[row];
        s0 += v * panels[k];
        s1 += v * panels[k + 1];
        s2 += v * panels[k + 2];
        s3 += v * panels[k + 3];
      }
      y[column] += s0; // behind y's end, this does nothing
      y[column + 1] += s1;
      y[column + 2] += s2;
      y[column + 3] += s3;
    }
}

/** Compiled once: V8 optimises a module, and all instances gain from it. */
let compiled: WebAssembly.Module | undefined;

function withSimd(memory: WebAssembly.Memory): Product {
  compiled ??= new WebAssembly.Module(assemble());
  const { exports } = new WebAssembly.Instance(compiled, { arena: { memory } });
  const product = exports.product as (x: number, rows: number, panels: number, y: number, count: number) => void;
  return (x, panels, y) =>
    product(x.byteOffset, x.length, panels.byteOffset, y.byteOffset, Math.ceil(y.length / PANEL));
}

/**
 * Return a WebAssembly module with the function product(x, rows, panels, y, count):
 *
 *     do {                                     // a panel
 *       s0 … s3 = y[0 … 15]
 *       xi = x
 *       do {                                   // a row
 *         v = *xi in all four lanes
 *         s0 … s3 += v · panels[0 … 15]
 *         panels += 16; xi += 1
 *       } while (xi < end)
 *       y[0 … 15] = s0 … s3
 *       y += 16
 *     } while (--count)
 *
 * Opcodes: https://webassembly.github.io/spec/core/binary/instructions.html
 */
function assemble(): Uint8Array<ArrayBuffer> {
  const [I32, V128, VOID] = [0x7f, 0x7b, 0x40];
  const [x, rows, panels, y, count, end, xi, v, s] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
  const get = (local: number) => [0x20, local];
  const set = (local: number) => [0x21, local];
  const i32 = (value: number) => [0x41, ...signed(value)];
  const [add, shiftLeft, less] = [0x6a, 0x74, 0x49];
  const simd = (opcode: number) => [0xfd, ...unsigned(opcode)];
  const load = (offset: number) => [...simd(0), 4, offset];
  const store = (offset: number) => [...simd(11), 4, offset];
  const loadIntoAllLanes = [...simd(9), 2, 0];
  const [addFloats, multiplyFloats] = [simd(0xe4), simd(0xe6)];
  const advance = (local: number, bytes: number) => [...get(local), ...i32(bytes), add, ...set(local)];
  const lanes = (code: (sum: number, offset: number) => number[]) => [0, 1, 2, 3].flatMap((k) => code(s + k, 16 * k));
  const doWhile = (body: number[], condition: number[]) => [0x03, VOID, ...body, ...condition, 0x0d, 0, 0x0b];

  const row = [
    ...get(xi), ...loadIntoAllLanes, ...set(v),
    ...lanes((sum, offset) => [
      ...get(v), ...get(panels), ...load(offset), ...multiplyFloats, ...get(sum), ...addFloats, ...set(sum),
    ]),
    ...advance(panels, 64),
    ...advance(xi, 4),
  ];
  const panel = [
    ...lanes((sum, offset) => [...get(y), ...load(offset), ...set(sum)]),
    ...get(x), ...set(xi),
    ...doWhile(row, [...get(xi), ...get(end), less]),
    ...lanes((sum, offset) => [...get(y), ...get(sum), ...store(offset)]),
    ...advance(y, 64),
    ...advance(count, -1),
  ];
  const code = [
    ...get(x), ...get(rows), ...i32(2), shiftLeft, add, ...set(end),
    ...doWhile(panel, get(count)),
    0x0b,
  ];
  const body = [2, /* locals */ 2, I32, 5, V128, ...code];
  const text = (name: string) => [name.length, ...new TextEncoder().encode(name)];
  const section = (id: number, content: number[]) => [id, ...unsigned(content.length), ...content];
  return new Uint8Array([
    ...[0, 0x61, 0x73, 0x6d, 1, 0, 0, 0], // "\0asm", version 1
    ...section(1, [1, 0x60, 5, I32, I32, I32, I32, I32, 0]), // a type: five integers → nothing
    ...section(2, [1, ...text("arena"), ...text("memory"), 2, 0, 0]), // an import: a memory of any size
    ...section(3, [1, 0]), // a function of that type
    ...section(7, [1, ...text("product"), 0, 0]), // an export
    ...section(10, [1, ...unsigned(body.length), ...body]),
  ]);
}

/** LEB128, the variable length of WebAssembly's integers. */
function unsigned(n: number): number[] {
  return n < 128 ? [n] : [(n & 127) | 128, ...unsigned(n >>> 7)];
}

function signed(n: number): number[] {
  return -64 <= n && n < 64 ? [n & 127] : [(n & 127) | 128, ...signed(n >> 7)];
}
