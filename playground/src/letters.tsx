/** A text whose characters are tinted by a number each, and of which one is looked at. */

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { at } from "./view";

interface Props {
  label: string;
  characters: string[];
  /** From 0 to 1, or from −1 to 1: how strong the tint is. Characters beyond these have none. */
  tints: Float32Array | undefined;
  /** Which colours the stylesheet takes: "surprise", "unit" or "reach". */
  kind: string;
  /** What is known of the character that is looked at. */
  description: string;
}

/** Show a character in a sentence. */
export function quote(character: string): string {
  return character === "\n" ? "line break" : character === " " ? "space" : `“${character}”`;
}

/**
 * A slider over the characters: arrow keys, Home and End move along them, as the pointer does.
 *
 * The elements of the characters are made and tinted by hand: there are thousands of them, and a number
 * changes in each when the slider moves.
 */
export function Letters({ label, characters, tints, kind, description }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const last = characters.length - 1;
  const index = Math.min(at.value, last);

  useLayoutEffect(() => {
    box.current!.replaceChildren(
      ...characters.map((character) => {
        const letter = document.createElement("i");
        letter.textContent = character === "\n" ? "↵\n" : character;
        if (character === "\n") letter.className = "break";
        return letter;
      }),
    );
  }, [characters]);

  useLayoutEffect(() => {
    const letters = box.current!.children;
    for (let i = 0; i < letters.length; i++) {
      const tint = (tints?.[i] ?? 0).toFixed(2);
      const { style } = letters[i] as HTMLElement;
      if (style.getPropertyValue("--tint") !== tint) style.setProperty("--tint", tint);
    }
  }, [characters, tints]);

  useEffect(() => {
    const letter = box.current!.children[index];
    letter?.classList.add("at");
    return () => letter?.classList.remove("at");
  }, [characters, index]);

  function look(event: PointerEvent): void {
    const letter = event.target as HTMLElement;
    if (letter.parentElement === box.current) {
      at.value = Array.prototype.indexOf.call(box.current!.children, letter);
    }
  }

  function move(event: KeyboardEvent): void {
    const to = moved(characters, index, event.key);
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    at.value = to;
    scrollTo(box.current!, box.current!.children[to] as HTMLElement);
  }

  return (
    <div
      ref={box}
      class={`letters ${kind}`}
      role="slider"
      tabIndex={0}
      aria-label={label}
      aria-valuemin={1}
      aria-valuemax={Math.max(1, characters.length)}
      aria-valuenow={index + 1}
      aria-valuetext={description}
      onKeyDown={move}
      onPointerOver={(event) => event.pointerType === "mouse" && look(event)}
      onPointerDown={look}
    />
  );
}

/** Where a key leads to from a character; undefined: nowhere. */
function moved(characters: string[], from: number, key: string): number | undefined {
  const last = characters.length - 1;
  const start = (i: number) => (i <= 0 ? 0 : characters.lastIndexOf("\n", i - 1) + 1); // of i's line
  const end = (i: number) => (characters.indexOf("\n", i) + 1 || last + 1) - 1;
  const column = from - start(from);
  switch (key) {
    case "ArrowLeft":
      return Math.max(0, from - 1);
    case "ArrowRight":
      return Math.min(last, from + 1);
    case "ArrowUp":
      return start(from) ? Math.min(start(start(from) - 1) + column, start(from) - 1) : 0;
    case "ArrowDown":
      return end(from) < last ? Math.min(end(from) + 1 + column, end(end(from) + 1)) : last;
    case "Home":
      return 0;
    case "End":
      return last;
  }
}

/** Scroll within the box only: `scrollIntoView` would move the page, too. */
function scrollTo(box: HTMLElement, letter: HTMLElement): void {
  const top = letter.offsetTop - box.offsetTop;
  const height = letter.offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top - height;
  else if (top + height > box.scrollTop + box.clientHeight) {
    box.scrollTop = top + 2 * height - box.clientHeight;
  }
}

/** Let two boxes of the same text scroll together. */
export function scrollBoth(event: Event): void {
  const box = event.target as HTMLElement;
  for (const other of (event.currentTarget as HTMLElement).querySelectorAll(".letters")) {
    if (other !== box) other.scrollTop = box.scrollTop;
  }
}
