"""A token joins a paged cache."""


def append(cache, block_table, lengths, new):
    page_size = cache.shape[1]
    for b in range(len(lengths)):
        position = int(lengths[b])
        page = int(block_table[b, position // page_size])
        cache[page, position % page_size] = new[b]
    return lengths + 1


solution = append
