/** The page's address: it follows what is shown, and Back returns to the panel before. */

import { effect } from "@preact/signals";
import { panel, PANELS, writeView, type Panel } from "./view";

/** Milliseconds between two changes of the URL; browsers refuse more than 100 in 30 seconds. */
const PAUSE = 500;

/** This load of the page: an entry of the history that another load made shows another view. */
const LOAD = performance.timeOrigin;

const address = () => {
  const view = writeView();
  return view ? `#${view}` : location.pathname + location.search;
};

let kept = "";

/** Write what is shown into the address. A replacement in vain could end a Back that is under way. */
export function keepAddress(): void {
  if (kept !== address()) history.replaceState(LOAD, "", (kept = address()));
}

const scrollTo = (name: Panel) => document.getElementById(name)!.scrollIntoView();

/** Scroll to a panel; Back returns. */
export function goTo(name: Panel): void {
  keepAddress();
  panel.value = name;
  history.pushState(LOAD, "", (kept = address()));
  scrollTo(name);
}

/** Keep the address up to date from now on. */
export function startAddress(): void {
  let timer = 0;
  effect(() => {
    writeView(); // runs again when any of it changes
    timer ||= window.setTimeout(() => {
      timer = 0;
      keepAddress();
    }, PAUSE);
  });
  window.addEventListener("popstate", ({ state }) => {
    const found = new URLSearchParams(location.hash.slice(1)).get("panel") ?? "writers";
    kept = ""; // that of another entry
    if (state === LOAD) scrollTo(PANELS.find((name) => name === found)!);
    else location.reload(); // another link was opened in this tab
  });
}
