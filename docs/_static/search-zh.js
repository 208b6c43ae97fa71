// Divide a query into words. Chinese has no spaces: take the longest words that the index of the pages has.
var splitQuery = (query) =>
  query
    .split(/([a-zA-Z0-9_]+)|[^\p{Letter}\p{Number}]+/u)
    .filter((run) => run)
    .flatMap((run) => {
      if (/^\w+$/.test(run)) return [run];
      const words = [];
      for (let start = 0, length; start < run.length; start += length) {
        length = run.length - start;
        while (length > 1 && !(run.substr(start, length) in Search._index.terms)) length--;
        if (length > 1) words.push(run.substr(start, length));
      }
      return words;
    });
