const SLICE = 8; // milliseconds of work, at most, between which a worker can answer other calls

/** The calls under way that a newer one may end, by slot. */
export class Slots {
  private readonly newest = new Map<string, Slices>();

  /** Begin a call, and end the one before it in the slot. */
  begin(slot: string | undefined): Slices {
    const slices: Slices = new Slices(() => slot === undefined || this.newest.get(slot) === slices);
    if (slot !== undefined) this.newest.set(slot, slices);
    return slices;
  }
}

/** A long call, cut into slices. */
export class Slices {
  private start = performance.now();

  constructor(private readonly wanted: () => boolean) {}

  /** Whether it is time to `rest`. */
  get over(): boolean {
    return performance.now() - this.start > SLICE;
  }

  /** Let other calls begin or continue. Throws an AbortError if a newer call has taken the slot. */
  async rest(): Promise<void> {
    await turn();
    if (!this.wanted()) throw new DOMException("A newer call has taken this one's place.", "AbortError");
    this.start = performance.now();
  }
}

/** Wait for the messages that have arrived. A timer would wait 4 ms longer. */
function turn(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
