// Runs before the page is drawn, so that a chosen appearance does not flash.
"use strict";

{
  const read = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  };
  const theme = read();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
