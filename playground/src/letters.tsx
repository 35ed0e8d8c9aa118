/** A text whose characters are tinted by a number each, and of which one is looked at. */

import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { colour, prepare, useSize } from "./canvas";
import { breakLines } from "./lines";
import { dark, near } from "./screen";
import { at, projector, type Panel } from "./view";

interface Props {
  label: string;
  characters: string[];
  /** From 0 to 1, or from −1 to 1: how strong the tint is. Characters beyond these have none. */
  tints: Float32Array | undefined;
  /** The panel that it is in, which also says which colours the stylesheet takes. */
  panel: Panel;
  /** What is known of the character that is looked at. */
  description: string;
}

/** Pixels around the text, and pixels from which on it scrolls: what is said of it is in sight below. */
const MARGIN = 12;
const MOST = 240;

/** Pixels of a line. */
const lineHeight = () => (projector.value ? 40 : 24);

/** The font: a smaller one in a narrow column. */
const fontOf = (width: number) =>
  `${projector.value ? 24 : width < 260 ? 12 : 14.5}px ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace`;

const advances = new Map<string, number>();

/** The width of a character, measured once: the first time takes long. */
function measure(font: string): number {
  if (!advances.has(font)) {
    const context = document.createElement("canvas").getContext("2d")!;
    context.font = font;
    advances.set(font, context.measureText("x").width);
  }
  return advances.get(font)!;
}

/** Show a character in a sentence. One that cannot be seen, or that acts on others, is shown by its number. */
export function quote(character: string): string {
  if (character === "\n") return "a line break";
  if (character === " ") return "a space";
  if (!/[\p{C}\p{Z}\p{M}]/u.test(character)) return `“${character}”`;
  return `U+${character.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}`;
}

/**
 * A slider over the characters: arrow keys, Home and End move along them, as the pointer does.
 *
 * Only the lines in sight are drawn, so that a long text costs no more than a short one.
 */
export function Letters({ label, characters, tints, panel, description }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const { width, height } = useSize(box);
  const [font, LINE] = [fontOf(width), lineHeight()];
  const advance = measure(font);
  const columns = width ? Math.max(8, Math.floor((width - 2 * MARGIN) / advance)) : Infinity;
  const starts = useMemo(() => breakLines(characters, columns), [characters, columns]);
  const index = Math.min(at.value, characters.length - 1);
  const [seen, night] = [near[panel].value, dark.value];

  /** The line that a character is in. */
  function lineOf(i: number): number {
    let [low, high] = [0, starts.length];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= i) low = middle;
      else high = middle;
    }
    return low;
  }

  function paint(): void {
    if (!width || !seen) return;
    const context = prepare(canvas.current!, width, height);
    const top = box.current!.scrollTop;
    const [text, faint] = [colour(box.current!, "--text"), colour(box.current!, "--muted")];
    const [positive, negative] = [colour(box.current!, "--tinted"), colour(box.current!, "--negative")];
    context.font = font;
    context.textBaseline = "middle";
    const first = Math.max(0, Math.floor((top - MARGIN) / LINE));
    const end = Math.min(starts.length, Math.ceil((top + height) / LINE));
    for (let line = first; line < end; line++) {
      const y = MARGIN + line * LINE - top;
      for (let i = starts[line]; i < (starts[line + 1] ?? characters.length); i++) {
        const x = MARGIN + (i - starts[line]) * advance;
        const tint = tints?.[i] ?? 0;
        context.globalAlpha = Math.abs(tint);
        context.fillStyle = tint < 0 ? negative : positive;
        context.fillRect(x, y + 2, advance, LINE - 4);
        context.globalAlpha = 1;
        context.fillStyle = characters[i] === "\n" && Math.abs(tint) < 0.3 ? faint : text; // by contrast
        context.fillText(characters[i] === "\n" ? "↵" : characters[i], x, y + LINE / 2);
        if (i === index) {
          context.strokeStyle = text;
          context.lineWidth = 2;
          context.strokeRect(x - 1, y + 2, advance + 2, LINE - 4);
        }
      }
    }
  }

  const painter = useRef(paint); // the newest: a scroll paints again without rendering
  painter.current = paint;
  useLayoutEffect(paint, [starts, tints, index, width, height, seen, night]);
  useLayoutEffect(() => {
    if (height && !box.current!.matches(":hover")) show(index);
  }, [index, starts, height]);

  /** Scroll within the box only: `scrollIntoView` would move the page, too. */
  function show(i: number): void {
    const top = lineOf(i) * LINE;
    const { scrollTop } = box.current!;
    if (top < scrollTop) box.current!.scrollTop = top - LINE;
    else if (top + 2 * LINE > scrollTop + height) box.current!.scrollTop = top + 3 * LINE - height;
  }

  function look(event: PointerEvent): void {
    const { left, top } = box.current!.getBoundingClientRect();
    const line = Math.floor((event.clientY - top - MARGIN + box.current!.scrollTop) / LINE);
    const column = Math.floor((event.clientX - left - MARGIN) / advance);
    const i = starts[line] + column;
    if (column >= 0 && i < (starts[line + 1] ?? characters.length)) at.value = i;
  }

  function move(event: KeyboardEvent): void {
    const line = lineOf(index);
    const last = characters.length - 1;
    const to = {
      ArrowLeft: index - 1,
      ArrowRight: index + 1,
      ArrowUp: line ? Math.min(starts[line - 1] + index - starts[line], starts[line] - 1) : 0,
      ArrowDown: Math.min((starts[line + 1] ?? last) + index - starts[line], (starts[line + 2] ?? last + 1) - 1),
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    at.value = Math.max(0, Math.min(last, to));
    show(at.value);
  }

  return (
    <div
      ref={box}
      class={`letters ${panel}`}
      style={{ height: `${Math.min(starts.length * LINE, MOST) + 2 * MARGIN + 2}px` }}
      role="slider"
      tabIndex={0}
      aria-label={label}
      aria-valuemin={1}
      aria-valuemax={Math.max(1, characters.length)}
      aria-valuenow={index + 1}
      aria-valuetext={description}
      onKeyDown={move}
      onPointerMove={(event) => event.pointerType === "mouse" && look(event)}
      onPointerDown={look}
      onScroll={() => painter.current()}
    >
      <canvas ref={canvas} />
      <div style={{ height: `${starts.length * LINE + 2 * MARGIN}px` }} />
    </div>
  );
}

/** Let two boxes of the same text scroll together. */
export function scrollBoth(event: Event): void {
  const box = event.target as HTMLElement;
  for (const other of (event.currentTarget as HTMLElement).querySelectorAll(".letters")) {
    if (other !== box) other.scrollTop = box.scrollTop;
  }
}
