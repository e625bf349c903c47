<?php
// A transport for Symfony Messenger that takes messages in batches and can list them, so that
// `messenger:failed:show` and `messenger:failed:retry` work on a tube. Register the factory:
//
//     services: { Beanstalkd\SymfonyTransportFactory: { tags: [messenger.transport_factory] } }
//
// and use the DSN beanstalkd-server://HOST:PORT/TUBE?batch=10&ttr=600. All times to run of a batch
// begin at once: ttr must be enough for the whole batch.
declare(strict_types=1);

namespace Beanstalkd;

use Pheanstalk\SocketFactory;
use Symfony\Component\Messenger\Envelope;
use Symfony\Component\Messenger\Exception\MessageDecodingFailedException;
use Symfony\Component\Messenger\Stamp\DelayStamp;
use Symfony\Component\Messenger\Stamp\TransportMessageIdStamp;
use Symfony\Component\Messenger\Transport\Receiver\ListableReceiverInterface;
use Symfony\Component\Messenger\Transport\Serialization\SerializerInterface;
use Symfony\Component\Messenger\Transport\TransportFactoryInterface;
use Symfony\Component\Messenger\Transport\TransportInterface;

final class SymfonyTransport implements TransportInterface, ListableReceiverInterface
{
    public function __construct(
        private Extensions $extensions,
        private SerializerInterface $serializer,
        private string $tube,
        private int $batch,
        private int $ttr,
        private bool $isWatching = false,
    ) {
    }

    public function get(): iterable
    {
        $this->isWatching = $this->isWatching || $this->extensions->watchOnly($this->tube);
        foreach ($this->extensions->reserve($this->batch) ?? [] as $id => $body) {
            try {
                yield $this->envelope($id, $body);
            } catch (MessageDecodingFailedException $exception) {
                $this->extensions->delete([$id]);
                throw $exception;
            }
        }
    }

    public function ack(Envelope $envelope): void
    {
        $this->extensions->delete([$envelope->last(TransportMessageIdStamp::class)->getId()]);
    }

    public function reject(Envelope $envelope): void
    {
        $this->ack($envelope);
    }

    public function send(Envelope $envelope): Envelope
    {
        $delay = intdiv($envelope->last(DelayStamp::class)?->getDelay() ?? 0, 1000);
        $body = json_encode($this->serializer->encode($envelope), \JSON_THROW_ON_ERROR);
        $id = $this->extensions->put($this->tube, $body, delay: $delay, ttr: $this->ttr);
        return $envelope->with(new TransportMessageIdStamp($id));
    }

    public function all(?int $limit = null): iterable
    {
        $page = max(1, min($limit ?? Extensions::MOST, Extensions::MOST));
        foreach ($this->extensions->bodies($this->tube, 'ready', $page) as $id => $body) {
            if ($limit !== null && $limit-- <= 0) {
                return;
            }
            yield $this->envelope($id, $body);
        }
    }

    public function find($id): ?Envelope
    {
        $body = $this->extensions->bodyOf((int) $id);
        return $body === null ? null : $this->envelope((int) $id, $body);
    }

    private function envelope(int $id, string $body): Envelope
    {
        $envelope = $this->serializer->decode(json_decode($body, true) ?? []);
        return $envelope->with(new TransportMessageIdStamp($id));
    }
}

final class SymfonyTransportFactory implements TransportFactoryInterface
{
    public function createTransport(string $dsn, array $options, SerializerInterface $serializer): TransportInterface
    {
        $parts = parse_url($dsn);
        parse_str($parts['query'] ?? '', $query);
        $options += $query + ['batch' => 10, 'ttr' => 600];
        $extensions = new Extensions(new SocketFactory($parts['host'], $parts['port'] ?? 11300));
        $tube = ltrim($parts['path'] ?? '/default', '/');
        return new SymfonyTransport($extensions, $serializer, $tube, (int) $options['batch'], (int) $options['ttr']);
    }

    public function supports(string $dsn, array $options): bool
    {
        return str_starts_with($dsn, 'beanstalkd-server://');
    }
}
