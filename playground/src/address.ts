/** The page's address: it follows what is shown, and Back returns to the panel that was chosen before. */

import { effect } from "@preact/signals";
import { panel, writeView, type Panel } from "./view";

/** Milliseconds between two changes of the URL; browsers refuse more than 100 in 30 seconds. */
const PAUSE = 500;

/** What an entry of the browser's history keeps: the panel that was chosen, and the load of the page that made it. */
interface Entry {
  chosen: Panel;
  load: number;
}

const entry: Entry = { chosen: "writers", load: performance.timeOrigin };

const address = () => {
  const view = writeView();
  return view ? `#${view}` : location.pathname + location.search;
};

/** Write what is shown into the address. */
export const keepAddress = () => history.replaceState(entry, "", address());

/** The documentation around this page; null where the page is served alone, so that no link leads nowhere. */
export const SITE = /\/playground\/(index\.html)?$/.test(location.pathname) ? "../" : null;

/** Scroll to a panel; Back returns. */
export function goTo(name: Panel, behavior?: ScrollBehavior): void {
  keepAddress();
  entry.chosen = panel.value = name;
  history.pushState(entry, "", address());
  scroll(behavior);
}

const scroll = (behavior?: ScrollBehavior) => document.getElementById(entry.chosen)!.scrollIntoView({ behavior });

/** Keep the address up to date from now on. */
export function startAddress(): void {
  entry.chosen = panel.value;
  let timer = 0;
  effect(() => {
    writeView(); // runs again when any of it changes
    timer ||= window.setTimeout(() => {
      timer = 0;
      keepAddress();
    }, PAUSE);
  });
  window.addEventListener("popstate", ({ state }: { state: Entry | null }) => {
    if (state?.load !== entry.load) return location.reload(); // another link was opened in this tab
    entry.chosen = state.chosen;
    scroll();
  });
}
