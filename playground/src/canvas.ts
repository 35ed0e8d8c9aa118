/** What is drawn by hand: sizes, pixels and the stylesheet's colours. */

import type { RefObject } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";

/** The inner size of an element, kept up to date. */
export function useSize(of: RefObject<HTMLElement | null>): { width: number; height: number } {
  const [size, setSize] = useState({ width: 0, height: 0 });
  useLayoutEffect(() => {
    const element = of.current!;
    const observer = new ResizeObserver(() => {
      setSize({ width: element.clientWidth, height: element.clientHeight });
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return size;
}

/** Clear a canvas of so many CSS pixels, sharp on this screen, and return what draws on it. */
export function prepare(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const [w, h] = [width, height].map((size) => Math.round(size * devicePixelRatio));
  if (canvas.width !== w || canvas.height !== h) {
    [canvas.width, canvas.height] = [w, h];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(w / width, 0, 0, h / height, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

for (const name of ["--text", "--muted", "--page", "--negative", "--positive", "--tinted"]) {
  CSS.registerProperty({ name, syntax: "<color>", inherits: true, initialValue: "transparent" });
}

/** A colour of the stylesheet, in the scheme that is shown: by its type, the browser computes it. */
export const colour = (element: Element, name: string) => getComputedStyle(element).getPropertyValue(name);
