/** Panel 3: the units of the state: one over the text, all of them over time. */

import { computed, signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { colour, prepare, useSize } from "../canvas";
import { analysed, type Analysed, follow, index, stale } from "../analysis";
import type { UnitInfo } from "../engine/types";
import { engine } from "../models";
import { Letters, quote } from "../letters";
import { dark, near } from "../screen";
import { at, unit } from "../view";
import { Legend, NumberField, Panel, ready } from "./parts";

/** Pixels per character of the heat map, and its least height. */
const CHARACTER = 4;
const HEIGHT = 256;

interface Inside {
  of: Analysed;
  /** (characters, units), row by row. */
  states: Float32Array;
}

const inside = signal<Inside | null>(null);

follow(
  () => near.inside.value,
  async (of) => {
    if (!near.inside.value || inside.value?.of === of) return inside.value;
    const { name } = of.info;
    return { of, states: await engine.states(name, of.tokens, null) };
  },
  (found) => (inside.value = found),
);

const known = signal<UnitInfo[]>([]);

// Not only when the panel is near: Tab has to find the buttons on its way down.
follow(
  () => undefined,
  (of) => engine.units(of.info.name),
  (units) => (known.value = units),
);

/** Those of the text that is shown. */
const current = computed(() => (inside.value?.of === analysed.value ? inside.value : null));
const numUnits = computed(() => (analysed.value ? analysed.value.info.hiddenDim * analysed.value.info.numLayers : 1));
const chosen = computed(() => Math.min(unit.value, numUnits.value - 1));

/** The unit's values, relative to the largest. */
const tints = computed(() => {
  if (!current.value) return undefined;
  const { states, of } = current.value;
  const values = Float32Array.from(of.tokens, (_, t) => states[t * numUnits.value + chosen.value]);
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-6);
  return values.map((value) => value / largest);
});

function describe(i: number, j: number): string {
  if (!current.value) return "…";
  const { states, of } = current.value;
  const layer = of.info.numLayers > 1 ? ` (layer ${1 + Math.floor(j / of.info.hiddenDim)})` : "";
  return `After ${quote(of.characters[i])}, unit ${j}${layer} is ${states[i * numUnits.value + j].toFixed(2)}.`;
}

const description = computed(() => (ready.value ? describe(index.value, chosen.value) : ""));
/** The same for the point of the heat map that the pointer is over. */
const pointed = signal("");

/** The colours from −1 to 1 in 255 steps, as pixels. */
function palette(element: Element): Uint32Array {
  const [low, zero, high] = ["--negative", "--page", "--positive"].map((name) =>
    colour(element, name).match(/[\d.]+/g)!.slice(0, 3).map(Number),
  );
  return Uint32Array.from({ length: 255 }, (_, i) => {
    const part = Math.abs(i - 127) / 127;
    const [r, g, b] = zero.map((from, c) => Math.round(from + part * ((i < 127 ? low : high)[c] - from)));
    return (255 << 24) | (b << 16) | (g << 8) | r;
  });
}

/** One column per character, one row per unit. Only the columns in sight are drawn. */
function HeatMap() {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const { width } = useSize(box);
  const { states, of } = current.value!;
  const [T, U] = [of.tokens.length, numUnits.value];
  const height = Math.max(HEIGHT, U);
  const [i, j, night] = [index.value, chosen.value, dark.value];

  function paint(): void {
    if (!width) return;
    const { scrollLeft } = box.current!;
    const first = Math.floor(scrollLeft / CHARACTER);
    const columns = Math.min(T - first, Math.ceil(width / CHARACTER) + 1);
    const colours = palette(box.current!);
    const image = new ImageData(columns, U);
    const pixels = new Uint32Array(image.data.buffer);
    for (let t = 0; t < columns; t++) {
      for (let u = 0; u < U; u++) {
        pixels[u * columns + t] = colours[127 + Math.round(127 * states[(first + t) * U + u])];
      }
    }
    sheet.width = columns;
    sheet.height = U;
    sheet.getContext("2d")!.putImageData(image, 0, 0);
    const context = prepare(canvas.current!, width, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, first * CHARACTER - scrollLeft, 0, columns * CHARACTER, height);
    context.strokeStyle = colour(box.current!, "--text");
    context.strokeRect(i * CHARACTER - scrollLeft - 0.5, -1, CHARACTER + 1, height + 2);
    context.strokeRect(-1, (j * height) / U - 0.5, width + 2, height / U + 1);
  }

  const painter = useRef(paint); // the newest: a scroll paints again without rendering
  painter.current = paint;
  useLayoutEffect(paint, [states, i, j, width, night]);
  useLayoutEffect(() => {
    const left = i * CHARACTER;
    const { scrollLeft } = box.current!;
    const inSight = left >= scrollLeft && left + CHARACTER <= scrollLeft + width;
    if (width && !inSight && !box.current!.matches(":hover")) box.current!.scrollLeft = left - width / 2;
  }, [i, width]);

  /** The character and the unit under the pointer. */
  function under(event: PointerEvent): [i: number, j: number] {
    const { left, top } = canvas.current!.getBoundingClientRect();
    const clamp = (place: number, size: number) => Math.max(0, Math.min(size - 1, Math.floor(place)));
    const x = event.clientX - left + box.current!.scrollLeft;
    return [clamp(x / CHARACTER, T), clamp(((event.clientY - top) / height) * U, U)];
  }

  function move(event: KeyboardEvent): void {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    at.value = Math.max(0, Math.min(T - 1, i + step[0]));
    unit.value = Math.max(0, Math.min(U - 1, j + step[1]));
  }

  return (
    <div
      ref={box}
      class="map"
      tabIndex={0}
      role="application"
      aria-roledescription="heat map"
      aria-label="The state over time: left and right move along the characters, up and down along the units."
      onPointerDown={(event) => ([at.value, unit.value] = under(event))}
      onPointerMove={(event) => (pointed.value = describe(...under(event)))}
      onPointerLeave={() => (pointed.value = "")}
      onKeyDown={move}
      onScroll={() => painter.current()}
    >
      <canvas ref={canvas} />
      <div style={{ width: `${T * CHARACTER}px` }} />
    </div>
  );
}

/** The states in sight, one pixel each. */
const sheet = document.createElement("canvas");

/** The units by what they follow, the closest first. */
function Units({ units }: { units: UnitInfo[] }) {
  return (
    <dl class="units">
      {[...new Set(units.map(({ follows }) => follows))].map((follows) => (
        <div key={follows}>
          <dt>{follows}</dt>
          {units.filter((found) => found.follows === follows).map((found) => (
            <dd key={found.unit}>
              <button
                type="button"
                aria-pressed={chosen.value === found.unit}
                aria-label={`Unit ${found.unit}: ${follows}, correlation ${found.correlation.toFixed(2)}`}
                onClick={() => (unit.value = found.unit)}
              >
                {found.unit} <small>({found.correlation.toFixed(2)})</small>
              </button>
            </dd>
          ))}
        </div>
      ))}
    </dl>
  );
}

export function Inside() {
  return (
    <Panel name="inside" title="Inside" busy={stale.value}>
      <p>
        The state has {numUnits} numbers, its units. Some follow something that a reader can name, at times several
        things; they are listed with their correlation over text that the model was not trained on. Choose one to
        tint the text by its value after each character. The state is never lost here: the slider at the top does
        not act.
      </p>
      {ready.value && (
        <>
          <Units units={known.value} />
          <div class="controls">
            <NumberField
              label={`Unit, 0 to ${numUnits.value - 1}`}
              most={numUnits.value - 1}
              value={chosen.value}
              onValue={(value) => (unit.value = value)}
            />
          </div>
          <p class="readout" aria-live="polite">{description}</p>
          <Letters
            panel="inside"
            label={`The text, tinted by unit ${chosen.value}`}
            characters={analysed.value!.characters}
            tints={tints.value}
            description={description.value}
          />
          <Legend panel="inside" low="negative" high="positive, relative to the unit's largest value" />
          <h3>The state over time</h3>
          <p>
            A column per character, a row per unit. Look for rows that change colour slowly: those units keep something
            over many characters, for example how long the line is.
          </p>
          <p class="readout">{pointed.value || description.value}</p>
          {current.value ? <HeatMap /> : <div class="map" />}
          <Legend panel="inside" low="−1" high="1" />
        </>
      )}
    </Panel>
  );
}
