/** Panel 3: the units of the state: one over the text, all of them over time. */

import { computed, signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { colour, prepare, useSize } from "../canvas";
import { analysed, type Analysed, follow, index, stale } from "../analysis";
import { CellStep } from "../cell";
import type { UnitInfo } from "../engine/types";
import { engine } from "../models";
import { Letters, quote } from "../letters";
import { dark, near } from "../screen";
import { slowestFirst } from "../slowness";
import { at, unit } from "../view";
import { Legend, NumberField, Panel, ready, signed } from "./parts";

/** Pixels of the heat map: per character, per unit, and between the slow units and the quick ones. */
const CHARACTER = 4;
const UNIT = 8;
const GAP = 8;
/** Units of the heat map: so many of the slowest, and of the quickest. */
const SOME = 20;

interface Inside {
  of: Analysed;
  /** (characters, units), row by row. */
  states: Float32Array;
  /** The unit of each row of the heat map: the slowest and the quickest, the slowest first. */
  order: Uint16Array;
}

const inside = signal<Inside | null>(null);

follow(
  () => near.inside.value,
  async (of) => {
    if (!near.inside.value || inside.value?.of === of) return inside.value;
    const { name, hiddenDim, numLayers } = of.info;
    const states = await engine.states(name, of.tokens, null);
    const all = slowestFirst(states, hiddenDim * numLayers);
    return { of, states, order: all.filter((_, row) => row < SOME || row >= all.length - SOME) };
  },
  (found) => (inside.value = found),
);

const known = signal<UnitInfo[]>([]);

// Not only when the panel is near: Tab has to find the list on its way down.
follow(
  () => undefined,
  (of) => engine.units(of.info.name),
  (units) => (known.value = units),
);

/** Those of the text that is shown. */
const current = computed(() => (inside.value?.of === analysed.value ? inside.value : null));
const numUnits = computed(() => (analysed.value ? analysed.value.info.hiddenDim * analysed.value.info.numLayers : 1));
/** Of the units that follow something, the closest. */
const closest = computed(() => {
  const strength = ({ correlation }: UnitInfo) => Math.abs(correlation);
  return known.value.reduce((a, b) => (strength(b) > strength(a) ? b : a), known.value[0])?.unit ?? 0;
});
const chosen = computed(() => Math.min(unit.value ?? closest.value, numUnits.value - 1));

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
  return `After ${quote(of.characters[i])}, unit ${j}${layer} is ${signed(states[i * numUnits.value + j])}.`;
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

/** Where a row begins, in pixels. */
const rowTop = (row: number) => UNIT * row + (row < SOME ? 0 : GAP);

/** One column per character, one row per unit. Only the columns in sight are drawn. */
function HeatMap() {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const { width } = useSize(box);
  const { states, of, order } = current.value!;
  const [T, U, R] = [of.tokens.length, numUnits.value, order.length];
  const height = rowTop(R);
  const [i, row, night] = [index.value, order.indexOf(chosen.value), dark.value];

  function paint(): void {
    if (!width) return;
    const { scrollLeft } = box.current!;
    const first = Math.floor(scrollLeft / CHARACTER);
    const columns = Math.min(T - first, Math.ceil(width / CHARACTER) + 1);
    const colours = palette(box.current!);
    const image = new ImageData(columns, R);
    const pixels = new Uint32Array(image.data.buffer);
    for (let t = 0; t < columns; t++) {
      for (let r = 0; r < R; r++) {
        pixels[r * columns + t] = colours[127 + Math.round(127 * states[(first + t) * U + order[r]])];
      }
    }
    sheet.width = columns;
    sheet.height = R;
    sheet.getContext("2d")!.putImageData(image, 0, 0);
    const context = prepare(canvas.current!, width, height);
    context.imageSmoothingEnabled = false;
    for (const r of [0, SOME]) {
      const [x, y] = [first * CHARACTER - scrollLeft, rowTop(r)];
      context.drawImage(sheet, 0, r, columns, SOME, x, y, columns * CHARACTER, SOME * UNIT);
    }
    context.strokeStyle = colour(box.current!, "--text");
    context.strokeRect(i * CHARACTER - scrollLeft - 0.5, -1, CHARACTER + 1, height + 2);
    if (row >= 0) context.strokeRect(-1, rowTop(row) - 0.5, width + 2, UNIT + 1);
  }

  const painter = useRef(paint); // the newest: a scroll paints again without rendering
  painter.current = paint;
  useLayoutEffect(paint, [states, i, row, width, night]);
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
    const y = event.clientY - top;
    return [clamp(x / CHARACTER, T), order[clamp((y < SOME * UNIT ? y : y - GAP) / UNIT, R)]];
  }

  function move(event: KeyboardEvent): void {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    at.value = Math.max(0, Math.min(T - 1, i + step[0]));
    if (step[1]) unit.value = order[Math.max(0, Math.min(R - 1, row + step[1]))];
  }

  return (
    <div class="bands">
      {["slowest", "quickest"].map((name) => (
        <p key={name} class="band" style={{ height: `${SOME * UNIT}px` }}>{SOME} {name}</p>
      ))}
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
    </div>
  );
}

/** The states in sight, one pixel each. */
const sheet = document.createElement("canvas");

/** The radio button that was pressed: a unit that follows several things is in the list several times. */
const pressed = signal("");

/** The units by what they follow, the closest first: radio buttons, which are one stop for Tab. */
function Units({ units }: { units: UnitInfo[] }) {
  const key = ({ unit, follows }: UnitInfo) => `${unit} ${follows}`;
  const same = units.filter((found) => found.unit === chosen.value);
  const checked = same.find((found) => key(found) === pressed.value) ?? same[0];
  return (
    <fieldset class="units">
      <legend>
        What each unit tracks, with its correlation in brackets: near 1, the unit is high where this is true or
        large; near −1, it is low there; near 0, it does not track this
      </legend>
      {[...new Set(units.map(({ follows }) => follows))].map((follows) => (
        <div key={follows}>
          <span>{follows}</span>
          {units.filter((found) => found.follows === follows).map((found) => (
            <label key={found.unit} class={found.unit === chosen.value ? "chosen" : ""}>
              <input
                type="radio"
                name="unit"
                aria-label={`Unit ${found.unit}: ${follows}, correlation ${signed(found.correlation)}`}
                checked={found === checked}
                onChange={() => ([unit.value, pressed.value] = [found.unit, key(found)])}
              />
              {found.unit} <small>({signed(found.correlation)})</small>
            </label>
          ))}
        </div>
      ))}
    </fieldset>
  );
}

export function Inside() {
  return (
    <Panel name="inside" title="Inside" busy={stale.value}>
      <p>
        The state is a list of {numUnits} numbers, called units. Nobody told them what to remember, and yet some track
        something we can name. Choose a unit, and the text takes its colour: orange where the unit is positive, blue
        where it is negative. Here the state is never reset, whatever the slider says.
      </p>
      {ready.value && (
        <>
          <p class="readout" aria-live="polite">{description}</p>
          <Letters
            panel="inside"
            label={`The text, tinted by unit ${chosen.value}`}
            characters={analysed.value!.characters}
            tints={tints.value}
            description={description.value}
          />
          <Legend panel="inside" low="negative" high="positive, relative to the unit's largest value" />
          <Units units={known.value} />
          <div class="controls">
            <NumberField
              label={`Unit, 0 to ${numUnits.value - 1}`}
              most={numUnits.value - 1}
              value={chosen.value}
              onValue={(value) => (unit.value = value)}
            />
          </div>
          <details>
            <summary>One step of the cell</summary>
            <CellStep unit={chosen.value} />
          </details>
          <details>
            <summary>The state over time</summary>
            <p>
              Each column is a character, each row a unit: the {SOME} that change most slowly in this text, and the{" "}
              {SOME} that change most quickly. The slow ones keep something over many characters, for example where in
              the line we are. The quick ones change with each letter. Click a row to see its unit in the text above.
            </p>
            <p class="readout">{pointed.value || description.value}</p>
            {current.value ? <HeatMap /> : <div class="map wait" />}
            <Legend panel="inside" low="−1" high="1" />
          </details>
        </>
      )}
    </Panel>
  );
}
