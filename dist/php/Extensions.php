<?php
// The commands that C beanstalkd does not have, for pheanstalk 4 or newer. They share the socket of
// pheanstalk, so that jobs reserved here can be touched, released and buried there:
//
//     $extensions = new Beanstalkd\Extensions(new Pheanstalk\SocketFactory('127.0.0.1', 11300));
//     $pheanstalk = Pheanstalk\Pheanstalk::createWithFactory($extensions);
//
// beanstalkd-protocol(7), EXTENSIONS, describes the commands. After a lost connection a command of
// pheanstalk must come first, as it opens the new one.
declare(strict_types=1);

namespace Beanstalkd;

use Pheanstalk\Contract\SocketFactoryInterface;
use Pheanstalk\Contract\SocketInterface;

final class Extensions implements SocketFactoryInterface
{
    /** As many jobs as one command lists, reserves or deletes. */
    public const MOST = 1000;

    private ?SocketInterface $socket = null;
    /** The socket, until pheanstalk has asked for it. */
    private ?SocketInterface $unclaimed = null;

    public function __construct(private SocketFactoryInterface $factory)
    {
    }

    /** Pheanstalk calls this for its first command, and again after a lost connection. */
    public function create(): SocketInterface
    {
        $this->socket = $this->unclaimed ?? $this->factory->create();
        $this->unclaimed = null;
        return $this->socket;
    }

    /** Returns whether the server has these commands. Call it before a job is reserved. */
    public function areSupported(): bool
    {
        return str_starts_with($this->send('touch-all'), 'TOUCHED_ALL ');
    }

    /** Yields the jobs of a tube, each with the keys of list-jobs. A tube that is not there is empty. */
    public function jobs(string $tube, string $state = 'any'): \Generator
    {
        $next = 0;
        do {
            $reply = $this->send("list-jobs $tube $state " . self::MOST . " $next");
            if ($reply === 'NOT_FOUND') {
                return;
            }
            $document = $this->body($this->numbers($reply, 'OK')[0]);
            preg_match('/^next: (\d+)$/m', $document, $page);
            preg_match_all('/^- \{(.*)\}$/m', $document, $lines);
            foreach ($lines[1] as $line) {
                preg_match_all('/([a-z-]+): (\w+)/', $line, $pairs);
                $job = array_combine($pairs[1], $pairs[2]);
                yield array_map(fn ($value) => is_numeric($value) ? (int) $value : $value, $job);
            }
            $next = (int) $page[1];
        } while ($next !== 0);
    }

    /** Yields the bodies of the jobs of a tube by id. A tube that is not there is empty. */
    public function bodies(string $tube, string $state = 'any', int $page = self::MOST): \Generator
    {
        $next = 0;
        do {
            $reply = $this->send("peek-batch $tube $state $page $next");
            if ($reply === 'NOT_FOUND') {
                return;
            }
            [$count, $next] = $this->numbers($reply, 'FOUND_BATCH');
            // The page is read as a whole, so that the caller can send commands between two jobs.
            yield from $this->batch($count, 'FOUND');
        } while ($next !== 0);
    }

    /** Watches this tube, and the tube default no longer. */
    public function watchOnly(string $tube): bool
    {
        $this->numbers($this->send("watch $tube"), 'WATCHING');
        return $tube === 'default' || $this->numbers($this->send('ignore default'), 'WATCHING') !== [];
    }

    /** Returns the body of a job, or null if it is not there. */
    public function bodyOf(int $id): ?string
    {
        $reply = $this->send("peek $id");
        return $reply === 'NOT_FOUND' ? null : $this->body($this->numbers($reply, 'FOUND')[1]);
    }

    /** Deletes all jobs of a tube, or only those that are buried. Returns their number. */
    public function flush(string $tube, bool $onlyBuried = false): int
    {
        $reply = $this->send(($onlyBuried ? 'flush-buried ' : 'flush-tube ') . $tube);
        return $reply === 'NOT_FOUND' ? 0 : $this->numbers($reply, 'FLUSHED')[0];
    }

    /**
     * Reserves at most this number of jobs of the watched tubes; returns their bodies by id. The
     * server waits at most this many seconds for the first job. Returns null if there is no job and
     * a job that the connection holds is within a second of its deadline.
     */
    public function reserve(int $count, int $seconds = 0): ?array
    {
        $reply = $this->send("reserve-batch $count $seconds");
        return $reply === 'DEADLINE_SOON'
            ? null
            : $this->batch($this->numbers($reply, 'RESERVED_BATCH')[0], 'RESERVED');
    }

    /** Deletes jobs; returns how many of them were there. */
    public function delete(array $ids): int
    {
        $deleted = 0;
        foreach (array_chunk($ids, self::MOST) as $chunk) {
            $reply = $this->send('delete-batch ' . implode(' ', $chunk));
            $deleted += $this->numbers($reply, 'DELETED_BATCH')[0];
        }
        return $deleted;
    }

    /** Restarts the time to run of all jobs that the connection holds; returns their number. */
    public function touchAll(): int
    {
        return $this->numbers($this->send('touch-all'), 'TOUCHED_ALL')[0];
    }

    /** Puts a job into a tube that need not be the used one; returns its id. */
    public function put(string $tube, string $body, int $pri = 1024, int $delay = 0, int $ttr = 60): int
    {
        $line = "put-in-tube $tube $pri $delay $ttr " . strlen($body);
        return $this->numbers($this->send("$line\r\n$body"), 'INSERTED')[0];
    }

    private function send(string $line): string
    {
        $this->socket ??= $this->unclaimed = $this->factory->create();
        $this->socket->write("$line\r\n");
        return $this->socket->getLine();
    }

    /** Returns the numbers after the word of a reply. */
    private function numbers(string $reply, string $word): array
    {
        $words = explode(' ', $reply);
        if (array_shift($words) !== $word) {
            throw new \RuntimeException("beanstalkd replied \"$reply\" instead of $word");
        }
        return array_map('intval', $words);
    }

    /** Reads the jobs of a batch; returns their bodies by id. */
    private function batch(int $count, string $word): array
    {
        $bodies = [];
        while ($count-- > 0) {
            [$id, $bytes] = $this->numbers($this->socket->getLine(), $word);
            $bodies[$id] = $this->body($bytes);
        }
        return $bodies;
    }

    private function body(int $bytes): string
    {
        return substr($this->socket->read($bytes + 2), 0, $bytes);
    }
}
